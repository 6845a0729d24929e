"""The verification of strategies finds planted faults in rules."""

from __future__ import annotations

import pytest

from jobs.nnscaler_one_op import f, ints, one_op
from jobs.nnscaler_rule_oracle import check_strategy
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.registry import register_rule, rule_for, strategies_of
from nnx_nnscaler.rules.rule import Rule


class _Written(Rule):
    """A rule that returns given strategies."""

    def __init__(self, code: str) -> None:
        self.code = code

    def strategies(self, op, graph, size):
        return []

    def write(self, op, strategy, writer):
        return self.code


@pytest.mark.parametrize(
    ("target", "args", "inputs", "outputs"),
    [
        ("aten.softmax.int", (f(4, 8), -1), (S(1),), (S(1),)),
        ("aten.layer_norm.default", (f(4, 8), [8], f(8), f(8)), (S(1), S(0), S(0)), (S(1),)),
        ("aten.mul.Tensor", (f(4, 8), f(4, 8)), (P, P), (P,)),
        ("aten.gelu.default", (f(4, 8),), (P,), (P,)),
        ("aten.add.Tensor", (f(4, 8), f(4, 8)), (P, R), (P,)),
        ("aten.sum.dim_IntList", (f(4, 8), [1]), (S(1),), (R,)),
        ("aten.transpose.int", (f(4, 8), 0, 1), (S(0),), (S(0),)),
        ("aten.split.Tensor", (f(4, 24), 8, 1), (S(1),), (S(1),) * 3),
        ("aten.cat.default", ([f(4, 8), f(4, 8)], 1), (S(1), S(1)), (S(1),)),
        ("aten.embedding.default", (f(16, 8), ints(4, 8)), (S(0), S(0)), (S(0),)),
        ("aten.gelu.default", (f(4, 8),), (R,), (P,)),
    ],
)
def test_a_wrong_strategy_is_found(target, args, inputs, outputs):
    graph, op = one_op(target, *args)
    assert check_strategy(op, graph, Strategy("planted", inputs, outputs), 2, rule=_plain())


def _plain() -> Rule:
    class _Plain(_Written):
        def write(self, op, strategy, writer):
            return writer.call(op)

    return _Plain("")


@pytest.mark.parametrize(
    ("target", "args", "name", "code", "says"),
    [
        (
            "aten.linear.default",
            (f(4, 16), f(8, 16), f(8)),
            "row",
            "F.linear(x0, x1, x2)",
            "result 0 (P)",
        ),
        (
            "aten.linear.default",
            (f(4, 16), f(8, 16), f(8)),
            "row",
            "F.linear(x0, x1, rt.once(x2).detach())",
            "x2 gets no gradient on 2 of 2 ranks",
        ),
        (
            "aten.linear.default",
            (f(4, 16), f(8, 16), f(8)),
            "column",
            "F.linear(rt.keep__all_reduce(x0), x1, x2)",
            "gradient of x0 (R)",
        ),
        ("aten.mean.default", (f(4, 8),), "batch", "x0.mean()", "result 0 (P)"),
        ("aten.dropout.default", (f(4, 8), 0.5, True), "batch", "rt.dropout(x0, 0.5)", "result 0"),
        ("aten.embedding.default", (f(16, 8), ints(4)), "vocabulary", "F.embedding(x1 % 8, x0)", "result 0"),
        (
            "aten.cross_entropy_loss.default",
            (f(16, 4), ints(16), None, 1, 3),
            "batch",
            "F.cross_entropy(x0, x1, ignore_index=3) / 2",
            "result 0 (P)",
        ),
        ("aten.gelu.default", (f(4, 8),), "batch", "F.gelu(x0).float()", "torch.float32"),
        ("aten.gelu.default", (f(4, 8),), "batch", "F.gelu(y)", "NameError"),
    ],
)
def test_wrong_code_is_found_and_said(target, args, name, code, says):
    graph, op = one_op(target, *args)
    strategy = next(s for s in strategies_of(op, graph, 2) if s.name == name)
    assert check_strategy(op, graph, strategy, 2) == ""
    assert says in check_strategy(op, graph, strategy, 2, rule=_Written(code))


def test_ranks_that_do_not_agree_on_a_whole_result_are_found():
    graph, op = one_op("aten.gelu.default", f(4, 8))
    strategy = Strategy("planted", (R,), (R,))
    said = check_strategy(op, graph, strategy, 2, rule=_Written("F.gelu(x0) + rt.rank"))
    assert "do not have the same" in said


def test_an_operator_that_cannot_be_run_is_said_to_be_untried():
    graph, op = one_op("aten.view.default", f(4, 8), [32])
    op.args = (op.args[0], [31])
    assert "cannot be run on made-up values" in check_strategy(op, graph, strategies_of(op, graph, 2)[0], 2)


def test_a_registered_rule_is_preferred_and_asked_for_all_overloads():
    rule = _Written("x0")
    _, op = one_op("aten.gelu.default", f(4, 8))
    built_in = rule_for(op)
    register_rule("aten.gelu", rule)
    try:
        assert rule_for(op) is rule
    finally:
        register_rule("aten.gelu", built_in)


def test_the_state_of_the_callers_generator_is_left_alone():
    import torch

    graph, op = one_op("aten.dropout.default", f(4, 8), 0.5, True)
    before = torch.get_rng_state()
    check_strategy(op, graph, strategies_of(op, graph, 2)[1], 2)
    assert torch.equal(torch.get_rng_state(), before)
