"""Every strategy of every rule, against the operator in one process."""

from __future__ import annotations

import pytest

from jobs.nnscaler_one_op import T, f, ints, one_op
from jobs.nnscaler_rule_cases import CASES
from jobs.nnscaler_rule_oracle import check_strategy
from nnx_nnscaler.ir.placement import P, R, S
from nnx_nnscaler.rules.registry import has_rule, rule_for, strategies_of
from nnx_nnscaler.rules.rule import replicate


def _case(case):
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    return one_op(f"aten.{target}", *args, **kwargs)


def _name(case):
    return f"{case[0]}-{CASES.index(case)}"


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_every_strategy_gives_the_results_and_gradients_of_the_whole_operator(case, size):
    graph, op = _case(case)
    strategies = strategies_of(op, graph, size)
    assert strategies[0] == replicate(op)
    assert has_rule(op)
    assert strategies == strategies_of(op, graph, size)
    assert len({(s.inputs, s.outputs) for s in strategies}) == len(strategies)
    draws = ("unit",) if "binary" in op.target else ("normal",)
    for strategy in strategies:
        for name, placement in zip(op.operands(), strategy.inputs, strict=True):
            assert placement.fits(graph.meta(name).hints, size)
        assert check_strategy(op, graph, strategy, size, draws=draws) == ""


def _placements(graph, op, size=2):
    return {s.name: (*s.inputs, "->", *s.outputs) for s in strategies_of(op, graph, size)[1:]}


def test_a_linear_is_cut_by_samples_columns_and_rows():
    assert _placements(*one_op("aten.linear.default", f(4, 8, 16), f(32, 16), f(32))) == {
        "batch": (S(0), R, R, "->", S(0)),
        "dim1": (S(1), R, R, "->", S(1)),
        "column": (R, S(0), S(0), "->", S(2)),
        "row": (S(2), S(1), R, "->", P),
    }


def test_an_embedding_is_cut_by_samples_columns_and_vocabulary():
    assert _placements(*one_op("aten.embedding.default", f(16, 8), ints(4, 8))) == {
        "batch": (R, S(0), "->", S(0)),
        "dim1": (R, S(1), "->", S(1)),
        "column": (S(1), R, "->", S(2)),
        "vocabulary": (S(0), R, "->", P),
    }


def test_cross_entropy_is_cut_by_samples_and_vocabulary():
    assert _placements(*one_op("aten.cross_entropy_loss.default", f(8, 16), ints(8))) == {
        "batch": (S(0), S(0), "->", P),
        "targets": (S(0), R, "->", P),
        "vocabulary": (S(1), R, "->", R),
    }


def test_attention_is_cut_by_samples_heads_and_queries_and_a_broadcast_mask_stays_whole():
    tensors = [f(4, 4, 8, 8)] * 3
    assert _placements(
        *one_op("aten.scaled_dot_product_attention.default", *tensors, T((1, 1, 8, 8), "bool"))
    ) == {
        "batch": (S(0), S(0), S(0), R, "->", S(0)),
        "heads": (S(1), S(1), S(1), R, "->", S(1)),
        "query": (S(2), R, R, S(2), "->", S(2)),
    }


def test_causal_attention_is_not_cut_by_queries_which_have_to_know_their_place():
    tensors = [f(4, 4, 8, 8)] * 3
    graph, op = one_op("aten.scaled_dot_product_attention.default", *tensors, None, 0.0, True)
    assert set(_placements(graph, op)) == {"batch", "heads"}


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.add.Tensor", (f(4, 8), 1)),
        ("aten.gelu.default", (f(4, 8),)),
        ("aten.mul.Tensor", (ints(4, 8), 2)),
        ("aten.to.dtype", (T((4, 8), "float64"), "float32")),
        ("aten.sum.default", (ints(4, 8),)),
    ],
)
def test_what_is_not_linear_or_not_floating_point_takes_and_makes_no_partial_sums(target, args):
    from nnx_nnscaler.ir.graph import Code

    args = [Code("torch.float32") if arg == "float32" else arg for arg in args]
    for strategy in strategies_of(*reversed(one_op(target, *args)), 2):
        assert P not in (*strategy.inputs, *strategy.outputs)


def test_of_a_product_only_one_factor_is_partial():
    graph, op = one_op("aten.mul.Tensor", f(4, 8), f(4, 8))
    partial = [s.inputs for s in strategies_of(op, graph, 2) if P in s.inputs]
    assert partial == [(P, R), (R, P)]


def test_a_value_used_twice_is_wanted_in_one_placement():
    graph, op = one_op("aten.matmul.default", f(8, 8), f(8, 8))
    op.args = (op.args[0], op.args[0])
    assert [s.name for s in strategies_of(op, graph, 2)] == ["replicate"]


def test_dims_that_do_not_divide_are_not_cut():
    graph, op = one_op("aten.linear.default", f(6, 16), f(5, 16))
    assert [s.name for s in strategies_of(op, graph, 4)] == ["replicate", "row"]
    assert [s.name for s in strategies_of(op, graph, 3)] == ["replicate", "batch"]


@pytest.mark.parametrize("target", ["aten.add_.Tensor", "module"])
def test_what_changes_its_operands_or_nobody_looked_into_is_replicated(target):
    graph, op = one_op("aten.add.Tensor", f(4, 8), f(4, 8))
    op.target = target
    assert strategies_of(op, graph, 2) == [replicate(op)]


def test_an_operator_without_a_rule_is_replicated_and_written_as_it_is(monkeypatch):
    monkeypatch.setenv("NNX_NNSCALER_PROBE", "0")
    graph, op = one_op("aten.add.Tensor", f(4, 8), f(4, 8))
    op.target = "nnx_test.unheard_of.default"
    assert strategies_of(op, graph, 2) == [replicate(op)]
    assert not has_rule(op)
    assert rule_for(op).index_bound(op, graph) is None
