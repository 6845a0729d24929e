"""Arguments of operators by name, for every form of the call."""

from __future__ import annotations

import pytest

from jobs.nnscaler_one_op import T, f, one_op
from nnx_nnscaler.ir.graph import Code, Op, Ref
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.rule import Call, argument_of, bound, operator_of, placement_of, with_code


def test_arguments_have_the_names_of_the_schema_and_defaults_are_known():
    _, op = one_op("aten.sum.dim_IntList", f(4, 8), [1], keepdim=True)
    assert bound(op) == {"self": Ref("x0"), "dim": [1], "keepdim": True}
    assert argument_of(op, "dtype") is None
    assert argument_of(op, "keepdim") is True
    assert argument_of(op, "unheard_of") is None


def test_an_operator_without_a_schema_has_numbered_arguments():
    op = Op("y", "getitem", (Ref("x"), 1), {}, None)
    assert bound(op) == {"arg0": Ref("x"), "arg1": 1}
    assert operator_of("getitem") is None
    assert operator_of("aten.no_such_operator.default") is None


def test_placements_are_found_by_name_across_lists():
    graph, op = one_op("aten.cat.default", [f(4, 8), f(4, 8)], 1)
    strategy = Call.of(op, graph, 2).strategy("planted", {"tensors": [S(0), P]}, [R])
    assert strategy.inputs == (S(0), P)
    assert placement_of(op, strategy, "tensors") == S(0)
    with pytest.raises(KeyError):
        placement_of(op, strategy, "dim")


def test_what_a_strategy_does_not_name_is_whole():
    graph, op = one_op("aten.linear.default", f(4, 8), f(16, 8), f(16))
    assert Call.of(op, graph, 2).strategy("planted", {"input": S(0)}, [S(0)]) == Strategy(
        "planted", (S(0), R, R), (S(0),)
    )


def test_code_takes_the_place_of_positional_and_keyword_arguments():
    _, op = one_op(
        "aten.scaled_dot_product_attention.default", *[f(2, 4, 8, 8)] * 3, attn_mask=T((8, 8), "bool")
    )
    changed = with_code(op, key="k", attn_mask="mask")
    assert changed.args == (Ref("x0"), Code("k"), Ref("x2"))
    assert changed.kwargs == {"attn_mask": Code("mask")}
    assert op.args[1] == Ref("x1")
