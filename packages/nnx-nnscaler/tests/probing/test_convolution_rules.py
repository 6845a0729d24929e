"""Operators of convolutional models: all splits, each tested at 2 and 4 ranks."""

from __future__ import annotations

import pytest

from jobs.nnscaler_one_op import f, one_op
from jobs.nnscaler_rule_oracle import check_strategy
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.registry import strategies_of

CONVOLUTION = {"batch", "output channels", "input channels"}
LEADING = {"batch", "channels"}
LINEAR = {*LEADING, "partial"}
ONES = [1, 1]

CASES = {
    "conv1d": (one_op("aten.conv1d.default", f(4, 8, 7), f(12, 8, 3), f(12)), CONVOLUTION),
    "conv1d same": (one_op("aten.conv1d.padding", f(4, 8, 7), f(12, 8, 3), None, [1], "same"), CONVOLUTION),
    "conv2d": (one_op("aten.conv2d.default", f(4, 8, 6, 6), f(12, 8, 3, 3), f(12), ONES, ONES), CONVOLUTION),
    "conv2d without bias": (one_op("aten.conv2d.default", f(4, 8, 6, 6), f(12, 8, 3, 3)), CONVOLUTION),
    "conv2d of one image": (
        one_op("aten.conv2d.default", f(8, 6, 6), f(12, 8, 3, 3), f(12)),
        CONVOLUTION - {"batch"},
    ),
    "conv3d": (one_op("aten.conv3d.default", f(4, 4, 4, 4, 4), f(8, 4, 2, 2, 2), f(8)), CONVOLUTION),
    "grouped": (
        one_op("aten.conv2d.default", f(4, 8, 6, 6), f(16, 2, 3, 3), f(16), ONES, ONES, ONES, 4),
        {"batch", "groups"},
    ),
    "depthwise": (
        one_op("aten.conv2d.default", f(4, 8, 6, 6), f(8, 1, 3, 3), None, ONES, ONES, ONES, 8),
        {"batch", "groups"},
    ),
    "in three groups": (
        one_op("aten.conv2d.default", f(4, 12, 6, 6), f(12, 4, 3, 3), None, ONES, ONES, ONES, 3),
        {"batch"},
    ),
    "transposed": (
        one_op("aten.conv_transpose2d.input", f(4, 8, 5, 5), f(8, 12, 2, 2), f(12), [2, 2]),
        CONVOLUTION,
    ),
    "transposed in groups": (
        one_op("aten.conv_transpose1d.default", f(4, 8, 5), f(8, 3, 2), f(12), [2], [0], [0], 4),
        {"batch", "groups"},
    ),
    "convolution": (
        one_op("aten.convolution.default", f(4, 8, 5), f(8, 12, 2), f(12), [2], [0], [1], True, [0], 1),
        CONVOLUTION,
    ),
    "max pool": (one_op("aten.max_pool2d.default", f(4, 8, 6, 6), [2, 2], [2, 2]), LEADING),
    "max pool of one image": (one_op("aten.max_pool2d.default", f(8, 6, 6), [2, 2]), {"channels"}),
    "max pool with indices": (one_op("aten.max_pool2d_with_indices.default", f(4, 8, 6, 6), [2, 2]), LEADING),
    "adaptive max pool": (one_op("aten.adaptive_max_pool2d.default", f(4, 8, 6, 6), [2, 2]), LEADING),
    "average pool": (one_op("aten.avg_pool1d.default", f(4, 8, 6), [2]), LINEAR),
    "adaptive average pool": (one_op("aten.adaptive_avg_pool2d.default", f(4, 8, 6, 6), [1, 1]), LINEAR),
    "nearest": (one_op("aten.upsample_nearest2d.vec", f(4, 8, 3, 3), None, [2.0, 2.0]), LINEAR),
    "bilinear": (one_op("aten.upsample_bilinear2d.vec", f(4, 8, 3, 3), [5, 5], False, None), LINEAR),
    "pixel shuffle": (one_op("aten.pixel_shuffle.default", f(4, 16, 3, 3), 2), LINEAR),
    "sampled at a grid": (
        one_op("aten.grid_sampler.default", f(4, 8, 6, 6), f(4, 5, 5, 2), 0, 0, False),
        LINEAR,
    ),
    "padded": (one_op("aten.pad.default", f(4, 8, 4, 5), [1, 2]), {"dim0", "dim1", "dim2", "partial"}),
    "padded with ones": (one_op("aten.pad.default", f(4, 8, 5), [1, 2], "constant", 1.0), {"dim0", "dim1"}),
    "reflected": (
        one_op("aten.pad.default", f(4, 8, 5, 5), [1, 1, 1, 1], "reflect"),
        {"dim0", "dim1", "partial"},
    ),
    "group norm": (one_op("aten.group_norm.default", f(4, 8, 3, 3), 4, f(8), f(8)), {"batch", "groups"}),
    "group norm of three groups": (
        one_op("aten.group_norm.default", f(4, 12, 3), 3, f(12), f(12)),
        {"batch"},
    ),
    "instance norm": (
        one_op("aten.instance_norm.default", f(4, 8, 3, 3), f(8), f(8), None, None, True, 0.1, 1e-5, False),
        LEADING,
    ),
}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("case", CASES)
def test_every_split_computes_what_the_whole_does(case: str) -> None:
    (graph, op), expected = CASES[case]
    for size in (2, 4):
        strategies = strategies_of(op, graph, size)
        assert {s.name for s in strategies[1:]} == expected
        for strategy in strategies:
            assert not check_strategy(op, graph, strategy, size)


@pytest.mark.quick(every=8, first=1)
@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        # The whole bias on every rank would be added once for each.
        ("conv2d", Strategy("a bias too many", (S(1), S(1), R), (P,))),
        ("conv2d", Strategy("channels mixed up", (S(1), S(0), S(0)), (S(1),))),
        ("padded with ones", Strategy("partial", (P,), (P,))),
        ("max pool", Strategy("partial", (P,), (P,))),
        ("group norm of three groups", Strategy("channels", (S(1), S(0), S(0)), (S(1),))),
    ],
)
def test_a_wrong_split_would_be_found(case: str, wrong: Strategy) -> None:
    (graph, op), _ = CASES[case]
    from nnx_nnscaler.rules.layers import LeadingDimsRule

    assert check_strategy(op, graph, wrong, 2, rule=LeadingDimsRule(0))


def test_what_does_not_divide_is_not_split() -> None:
    graph, op = one_op("aten.conv2d.default", f(3, 6, 5, 5), f(8, 6, 3, 3), f(8))
    assert [s.name for s in strategies_of(op, graph, 4)] == ["replicate", "output channels"]


def test_instance_norm_that_updates_statistics_is_left_whole() -> None:
    graph, op = one_op(
        "aten.instance_norm.default", f(4, 8, 3), f(8), f(8), f(8), f(8), True, 0.1, 1e-5, False
    )
    assert [s.name for s in strategies_of(op, graph, 2)] == ["replicate"]
