"""Grouped splits start at splits and views and reach the projection behind; samples stay together."""

from __future__ import annotations

import pytest

from jobs.nnscaler_one_op import B, T, one_op
from nnx_nnscaler.ir.graph import Graph, Op, Ref, Size, TensorMeta
from nnx_nnscaler.ir.placement import R, S
from nnx_nnscaler.rules.registry import strategies_of
from nnx_nnscaler.rules.rule import groups_at
from nnx_nnscaler.rules.shapes import size_at

HEADS, FEATURES = 8, 4
WIDTH = HEADS * FEATURES


def _meta(*shape):
    return TensorMeta(shape, "float32", True)


def _fused(*ops: Op) -> Graph:
    """Return a fused projection, a separate bias, and the operators that split the result."""
    batch = Size("B", 8)
    metas = {"x": _meta(batch, 16, WIDTH), "w": _meta(3 * WIDTH, WIDTH), "b": _meta(3 * WIDTH)}
    made = _meta(batch, 16, 3 * WIDTH)
    project = Op("qkv", "aten.linear.default", (Ref("x"), Ref("w")), {}, made)
    add = Op("added", "aten.add.Tensor", (Ref("qkv"), Ref("b")), {}, made)
    graph = Graph([], {}, {}, {}, metas, [project, add, *ops], None, symbols={"B": ("x", 0)})
    return graph


def _by_split() -> Graph:
    part = _meta(Size("B", 8), 16, WIDTH)
    split = Op("parts", "aten.split.Tensor", (Ref("added"), WIDTH, 2), {}, (part,) * 3)
    items = [Op(f"q{i}", "getitem", (Ref("parts"), i), {}, part) for i in range(3)]
    heads = Op(
        "heads",
        "aten.view.default",
        (Ref("q0"), [Size("B", 8), 16, HEADS, FEATURES]),
        {},
        _meta(Size("B", 8), 16, HEADS, FEATURES),
    )
    return _fused(split, *items, heads)


def _by_view() -> Graph:
    shape = (Size("B", 8), 16, 3, HEADS, FEATURES)
    view = Op("parts", "aten.view.default", (Ref("added"), list(shape)), {}, _meta(*shape))
    unbound = _meta(Size("B", 8), 16, HEADS, FEATURES)
    return _fused(view, Op("q", "aten.unbind.int", (Ref("parts"), 2), {}, (unbound,) * 3))


def _strategies(graph, name, size=2):
    op = next(op for op in graph.ops if op.name == name)
    return {(s.inputs, s.outputs) for s in strategies_of(op, graph, size)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("graph", [_by_split, _by_view])
def test_a_fused_projection_is_cut_by_heads(graph, size):
    graph = graph()
    assert ((R, S(0, groups=3)), (S(2, groups=3),)) in _strategies(graph, "qkv", size)
    assert ((S(2, groups=3), S(0, groups=3)), (S(2, groups=3),)) in _strategies(graph, "added", size)


def test_the_parts_of_a_split_are_cut_by_heads_and_so_is_the_view_of_them():
    graph = _by_split()
    assert ((S(2, groups=3),), (S(2), S(2), S(2))) in _strategies(graph, "parts")
    assert ((S(2),), (S(2),)) in _strategies(graph, "q1")
    assert ((S(2),), (S(2),)) in _strategies(graph, "heads")


def test_groups_go_no_further_than_they_are_of_use():
    graph = _by_split()
    _strategies(graph, "qkv")
    assert groups_at(graph, 2, "x", 2) == set()
    assert groups_at(graph, 2, "heads", 2) == set()
    assert groups_at(graph, 2, "w", 0) == {3}


def test_operators_that_differ_in_names_only_share_their_strategies():
    graph = _by_split()
    first, second = (next(op for op in graph.ops if op.name == name) for name in ("q0", "q1"))
    assert strategies_of(first, graph, 2) == strategies_of(second, graph, 2)
    known = len(graph.derived["strategies", 2])
    assert strategies_of(graph.ops[0], graph, 2) != strategies_of(graph.ops[1], graph, 2)
    assert len(graph.derived["strategies", 2]) == known


def _view(before, after):
    graph, op = one_op("aten.view.default", T(before), list(after))
    op.output = TensorMeta(tuple(after), "float32", True)
    return {(s.inputs[0], s.outputs[0]) for s in strategies_of(op, graph, 2) if s.inputs[0].is_shard}


def test_samples_merged_with_a_dim_are_cut_as_samples_only():
    assert _view((B(), 16, 32), (B(16), 32)) == {(S(0), S(0)), (S(2), S(1))}
    assert _view((B(16), 32), (B(), 16, 32)) == {(S(0), S(0)), (S(1), S(2))}


def test_sizes_that_are_equal_only_for_the_traced_batch_are_not_taken_for_each_other():
    assert _view((B(), 8, 4), (8, B(), 4)) == set()


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        ("B", 3),
        ("16*B + 1", 49),
        ("(B - 1)//2", 1),
        ("-B % 2", 1),
        ("B**2", 9),
        ("max(B, 2)", None),
        ("C", None),
    ],
)
def test_sizes_are_read_as_arithmetic_and_nothing_else(expr, value):
    assert size_at(Size(expr, 7), {"B": 3}) == value


def test_a_fixed_size_is_its_own_value():
    assert size_at(5, {}) == 5
