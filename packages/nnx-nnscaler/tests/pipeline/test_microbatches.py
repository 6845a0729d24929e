"""Values under a split batch, and batches that cannot be split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.codegen.emit import emit, inputs_of, load_program
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.placement import P, R, S
from nnx_nnscaler.pipeline.microbatches import Microbatches, cut_batch
from nnx_nnscaler.pipeline.random_masks import draw_masks_first
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.trace import trace_forward


class Scores(nn.Module):
    """A forward of any kind over a linear layer."""

    def __init__(self, forward: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)  # type: ignore[operator, no-any-return]


def graph_of(forward: object) -> Graph:
    return trace_forward(Scores(forward), (torch.randn(8, 4),), {})


def cut(forward: object) -> Microbatches:
    return cut_batch(graph_of(forward))


def returned(found: Microbatches) -> object:
    return found.placements[found.graph.outputs.name]


@pytest.mark.full
def test_samples_are_cut_sums_are_summands_and_what_has_no_batch_is_equal() -> None:
    assert returned(cut(lambda m, x: m.layer(x).relu())) == S(0)
    assert returned(cut(lambda m, x: m.layer(x).t())) == S(1)
    assert returned(cut(lambda m, x: m.layer(x).sum())) == P
    assert cut(lambda m, x: (m.layer(x), m.layer.weight * 2)).placements["mul"] == R


def test_means_are_divided_by_the_number_of_microbatches() -> None:
    found = cut(lambda m, x: m.layer(x).mean())
    assert returned(found) == P
    assert found.graph.ops[-1].args[1].text == "rt.microbatches"


def test_means_over_classes_are_divided_by_the_samples_that_count() -> None:
    found = cut(lambda m, x: F.cross_entropy(m.layer(x), x.argmax(-1)))
    (count,) = found.counts
    assert count.name == found.graph.outputs.name
    assert count.ignore_index == -100


def test_sizes_in_numbers_are_those_of_the_whole_batch() -> None:
    found = cut(lambda m, x: m.layer(x).sum() / x.shape[0])
    assert returned(found) == P
    (divided,) = [op for op in found.graph.ops if op.target.startswith("aten.div")]
    assert "rt.microbatches" in divided.args[1].expr


def test_what_follows_from_inputs_alone_is_computed_for_the_whole_batch_before() -> None:
    found = cut(lambda m, x: (m.layer(x) * x[:, :1]).sum() / x.sum().clamp(min=1))
    assert returned(found) == P
    assert [found.placements[name] for name in found.ahead] == [R]
    in_order = cut(lambda m, x: (m.layer(x).mean(1) * x[:, 0].sort().values).sum())
    assert [in_order.placements[name] for name in in_order.ahead] == [S(0)]


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.layer(x).mean() + m.layer.weight.square().sum(),
        lambda m, x: 1 - m.layer(x).mean(),
        lambda m, x: m.layer(x).sum() - 0.5,
    ],
)
def test_microbatches_share_what_is_added_to_a_sum(forward: object) -> None:
    found = cut(forward)
    assert returned(found) == P
    assert any("rt.microbatches" in str(op.args) for op in found.graph.ops[-2:])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: F.softmax(m.layer(x), 0), "softmax"),
        (lambda m, x: m.layer(x) @ m.layer(x).t(), "matmul"),
        (lambda m, x: m.layer(x).mean().exp(), "exp"),
        (lambda m, x: m.layer(x).mean() + m.layer(x), "add"),
        (lambda m, x: m.layer.weight.square().sum(), "no output has a batch dimension"),
        (lambda m, x: m.layer(x).std(0), "std"),
        (lambda m, x: m.norm(m.layer(x)), "writes in place"),
        (lambda m, x: m.layer(x) * x.t().flatten().cumsum(0)[-1], "flatten"),
    ],
)
def test_what_mixes_samples_is_named(forward: object, reason: str) -> None:
    found = cut(forward)
    assert reason in found.hindrance
    assert not found.placements


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.layer(x).relu(),
        lambda m, x: F.cross_entropy(m.layer(x), x.argmax(-1)),
        lambda m, x: m.norm(m.layer(x)).mean() + m.layer.weight.square().sum(),
        lambda m, x: (m.layer(x), (m.layer(x).argmax(-1) == x.argmax(-1)).sum()),
        lambda m, x: (m.layer(x) * x[:, :1]).sum() / x.sum().clamp(min=1),
    ],
)
def test_evaluation_is_cut_as_training_is(forward: object) -> None:
    module = Scores(forward).eval()
    training = cut_batch(trace_forward(module, (torch.randn(8, 4),), {}))
    with torch.no_grad():
        evaluation = cut_batch(trace_forward(module, (torch.randn(8, 4),), {}))
    assert not any(meta.differentiable for meta in evaluation.graph.metas.values())
    assert not evaluation.hindrance
    assert evaluation.placements == training.placements
    assert [op.target for op in evaluation.graph.ops] == [op.target for op in training.graph.ops]


def test_dropout_becomes_a_product_with_a_mask_of_the_whole_batch() -> None:
    graph, (draw,) = draw_masks_first(graph_of(lambda m, x: m.drop(m.layer(x))))
    assert draw.p == 0.5
    assert graph.inputs[-1].name == draw.name
    assert returned(cut_batch(graph)) == S(0)


def test_other_random_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"draws random numbers"):
        draw_masks_first(graph_of(lambda m, x: m.layer(x) + torch.rand_like(m.layer(x))))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("variant", ["plain", "causal", "masked", "added", "grouped"])
def test_attention_with_dropout_becomes_its_steps(variant: str) -> None:
    """Without dropped values the steps give the operator's result."""
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    if variant == "grouped":
        key, value = key[:, :2], value[:, :2]
    options: dict[str, object] = {
        "causal": {"is_causal": True},
        "masked": {"attn_mask": torch.rand(5, 5) > 0.3},
        "added": {"attn_mask": torch.randn(5, 5)},
        "grouped": {"enable_gqa": True},
    }.get(variant, {})

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, **options)  # type: ignore[arg-type]

    graph, (draw,) = draw_masks_first(trace_forward(Attention(), (query, key, value), {}))
    assert draw.p == 0.1
    program = load_program(emit(graph, plan_program(graph, size=1, policy="dp")))
    given = {
        **dict(zip(["q", "k", "v"], (query, key, value), strict=True)),
        draw.name: torch.ones(2, 4, 5, 5),
    }
    arguments = [given[name] for name in inputs_of(graph)]
    found = program(Runtime(GroupCommunicator(None)), None, {}, graph.constants, *arguments)
    expected = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
