"""The strategies that probing finds, the calls that it never makes, and its cache between processes."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor

from jobs.nnscaler_one_op import bools, f, ints, one_op
from jobs.nnscaler_rule_cases import CASES
from jobs.nnscaler_rule_oracle import _NumberWriter, check_strategy
from nnx_nnscaler.ir.graph import Ref, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules import probe
from nnx_nnscaler.rules.registry import rule_for, strategies_of
from nnx_nnscaler.rules.rule import Rule
from nnx_nnscaler.rules.trial import Trial, runner


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NNX_NNSCALER_PROBE", raising=False)
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(probe, "_fitting", {})


def names(target: str, *args, size: int = 2, **kwargs) -> list[str]:
    graph, op = one_op(target, *args, **kwargs)
    return [strategy.name for strategy in probe.discover(op, graph, size)]


FOUND = [
    (("aten.diagonal.default", f(4, 8, 6, 6), 0, 2, 3), {"S(0) -> S(0)", "S(1) -> S(1)"}),
    (
        ("aten.cdist.default", f(4, 8, 6), f(4, 12, 6)),
        {"S(0), S(0) -> S(0)", "S(1), R -> S(1)", "R, S(1) -> S(2)"},
    ),
    (("aten.trapezoid.x", f(4, 8, 16), f(16)), {"S(0), R -> S(0)", "S(1), R -> S(1)"}),
    (("aten.dot.default", f(8), f(8)), {"S(0), S(0) -> P"}),
    (("aten.mv.default", f(8, 16), f(16)), {"S(0), R -> S(0)", "S(1), S(0) -> P"}),
    (("aten.take_along_dim.default", f(4, 8), ints(4, 6), 1), {"S(0), S(0) -> S(0)", "R, S(1) -> S(1)"}),
    (("aten.polygamma.default", 2, f(4, 8)), {"S(0) -> S(0)", "S(1) -> S(1)"}),
    (("aten.unbind.int", f(2, 8)), {"S(1) -> S(0), S(0)"}),  # half of it makes half as many results
    (("aten.index.Tensor", f(4, 8), [ints(4, 1), ints(6)]), {"R, S(0), R -> S(0)", "R, R, S(0) -> S(1)"}),
    (("aten.linalg_norm.default", f(4, 8)), set()),
    (("aten.acosh.default", f(4, 8)), {"S(0) -> S(0)", "S(1) -> S(1)"}),  # not a number for most values
]


@pytest.mark.parametrize(("call", "expected"), FOUND, ids=[call[0] for call, _ in FOUND])
def test_splits_of_operators_without_a_rule_are_found(call, expected) -> None:
    assert set(names(*call)) == expected
    graph, op = one_op(*call)
    for size in (2, 4):
        for strategy in probe.discover(op, graph, size):
            assert not check_strategy(op, graph, strategy, size, rule=Plain(), draws=["unit"])


class Plain(Rule):
    def strategies(self, op, graph, size):
        return []

    def write(self, op, strategy, writer):
        return writer.call(op)


def test_operators_of_python_are_no_internal_ones() -> None:
    assert names("aten.__lshift__.Tensor", ints(4, 8), ints(4, 8))


@pytest.mark.parametrize(
    "call",
    [
        ("aten.dropout.default", f(4, 8), 0.5, True),
        ("aten.bernoulli.default", f(4, 8)),
        ("aten.add_.Tensor", f(4, 8), f(4, 8)),
        ("aten.view.default", f(4, 8), [8, 4]),
        ("aten.expand.default", f(1, 8), [4, 8]),
        ("aten.split.Tensor", f(4, 8), 4),
        ("aten.nonzero.default", f(4, 8)),
        ("aten.index.Tensor", f(4, 8), [bools(4, 8)]),
        ("aten._weight_norm.default", f(64, 16), f(64, 1)),  # its kernel would write past the end
    ],
    ids=lambda call: call[0],
)
def test_what_is_random_in_place_internal_or_takes_sizes_is_never_tried(call, monkeypatch) -> None:
    monkeypatch.setattr(probe, "_searched", lambda *args: pytest.fail("it was tried"))
    target = call[0]
    unknown = target in (
        "aten.nonzero.default",
        "aten.index.Tensor",
    )  # torch cannot tell the shape of the result
    graph, op = one_op("aten.abs.default", f(4, 8)) if unknown else one_op(*call)
    if target == "aten.index.Tensor":
        graph.metas["mask"] = TensorMeta((4, 8), "bool")
        op.args = (op.args[0], [Ref("mask")])
    op.target = target
    assert probe.discover(op, graph, 2) == []


def test_a_size_that_depends_on_the_batch_is_never_tried(monkeypatch) -> None:
    graph, op = one_op("aten.roll.default", f(4, 8), [2], [0])
    op.args = (op.args[0], [Size("B", 4)], [0])
    monkeypatch.setattr(probe, "_searched", lambda *args: pytest.fail("it was tried"))
    assert probe.discover(op, graph, 2) == []


def test_a_shift_is_not_mistaken_for_one_that_a_part_can_do_by_itself() -> None:
    # On small operands, whose second dim has 12 elements, a shift by 12 would do nothing at all.
    assert names("aten.roll.default", f(4, 64), [12], [1]) == ["S(0) -> S(0)"]


def test_a_bound_that_small_values_never_reach_is_not_mistaken_for_linear() -> None:
    assert names("aten.hardtanh.default", f(4, 8), -100.0, 100.0) == ["S(0) -> S(0)", "S(1) -> S(1)"]


def test_dims_that_are_too_small_to_split_are_not() -> None:
    assert names("aten.polygamma.default", 2, f(4, 6), size=4) == ["S(0) -> S(0)"]


def test_large_operands_are_tried_on_small_ones() -> None:
    start = time.process_time()
    assert names("aten.cross.default", f(2**14, 2**14, 3), f(2**14, 2**14, 3), -1) == [
        "S(0), S(0) -> S(0)",
        "S(1), S(1) -> S(1)",
    ]
    assert time.process_time() - start < 2


def test_switching_it_off_finds_nothing(monkeypatch) -> None:
    monkeypatch.setenv("NNX_NNSCALER_PROBE", "0")
    assert names("aten.polygamma.default", 2, f(4, 8)) == []


def test_finding_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    names("aten.polygamma.default", 2, f(4, 8))
    assert torch.equal(state, torch.get_rng_state())


def own_operator(name: str, function, slope: float = 1.0) -> None:
    """Register an operator with a gradient, which only its behaviour makes unsplittable."""
    operator = torch.library.custom_op(
        f"nnx_test_probing::{name}", function, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, gradient: gradient * slope)


def _draws(x: Tensor) -> Tensor:
    torch.rand(())
    return x.clone()


def _raises(x: Tensor) -> Tensor:
    raise KeyError("not on this device")


own_operator("copied", lambda x: x.clone())
own_operator("draws", _draws)
own_operator("touchy", _raises)
own_operator("nothing", lambda x: x * float("nan"), slope=float("nan"))


@torch.library.custom_op("nnx_test_probing::cubed", mutates_args=())
def cubed(x: Tensor, index: Tensor | None = None) -> Tensor:
    return x**3


cubed.register_fake(lambda x, index=None: torch.empty_like(x))
cubed.register_autograd(
    lambda ctx, g: (3 * g * ctx.saved_tensors[0] ** 2, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_somebodys_own_operator_is_tried_too() -> None:
    assert names("nnx_test_probing.cubed.default", f(4, 8)) == ["S(0) -> S(0)", "S(1) -> S(1)"]


def test_an_operator_that_draws_without_saying_so_is_left_whole() -> None:
    assert names("nnx_test_probing.copied.default", f(4, 8)) == ["S(0) -> S(0)", "S(1) -> S(1)"]
    assert names("nnx_test_probing.draws.default", f(4, 8)) == []


def test_an_operator_that_raises_whatever_it_likes_is_left_whole() -> None:
    assert names("nnx_test_probing.touchy.default", f(4, 8)) == []


def test_what_is_never_a_number_proves_nothing() -> None:
    assert names("nnx_test_probing.nothing.default", f(4, 8)) == []


def test_somebodys_own_kernel_is_given_no_made_up_indices() -> None:
    assert names("nnx_test_probing.cubed.default", f(4, 8), ints(4)) == []


# --- kept between processes ---------------------------------------------------------------------


CALL = ("aten.polygamma.default", 2, f(4, 8))
KEPT = ["S(0) -> S(0)", "S(1) -> S(1)"]


def forget(monkeypatch) -> None:
    """As a new process begins."""
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(probe, "_fitting", {})


def kept_files():
    return sorted(probe.cache_dir().iterdir())


def test_what_was_found_is_not_searched_again(monkeypatch) -> None:
    assert names(*CALL) == KEPT
    forget(monkeypatch)
    monkeypatch.setattr(probe, "_searched", lambda *args: pytest.fail("it was searched again"))
    assert names(*CALL) == KEPT
    assert names(*CALL, size=4) == KEPT
    (file,) = kept_files()
    assert json.loads(file.read_text())["call"]["operator"] == "aten.polygamma.default"


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": 1}', "null", '{"format": 0, "call": {}}', "\x00\xff"]
)
def test_a_damaged_file_is_ignored_and_written_anew(damage, monkeypatch) -> None:
    names(*CALL)
    (file,) = kept_files()
    right = file.read_text()
    file.write_bytes(damage.encode("latin-1"))
    forget(monkeypatch)
    assert names(*CALL) == KEPT
    assert kept_files() == [file]
    assert file.read_text() == right


def test_a_placement_that_cannot_be_read_is_ignored(monkeypatch) -> None:
    names(*CALL)
    (file,) = kept_files()
    right = file.read_text()
    file.write_text(right.replace('"S(0)"', '"S(zero)"'))
    forget(monkeypatch)
    assert names(*CALL) == KEPT
    assert file.read_text() == right


def test_other_arguments_are_another_file() -> None:
    names("aten.polygamma.default", 2, f(4, 8))
    names("aten.polygamma.default", 3, f(4, 8))
    names("aten.polygamma.default", 3, f(4, 8, 4))
    assert len(kept_files()) == 3


def test_operands_that_are_alike_share_what_was_found() -> None:
    names("aten.cross.default", f(512, 1024, 3), f(512, 1024, 3), -1)
    names("aten.cross.default", f(640, 2048, 3), f(640, 2048, 3), -1)
    assert len(kept_files()) == 1


def test_a_cache_directory_that_is_a_file_is_done_without(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "file"))
    assert names(*CALL) == KEPT


def test_what_somebodys_own_operator_does_is_not_kept() -> None:
    names("nnx_test_probing.cubed.default", f(4, 8))
    assert not probe.cache_dir().exists()


def test_the_cache_is_below_the_users_cache_directory_by_default(monkeypatch) -> None:
    monkeypatch.delenv("NNX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(probe.cache_dir()).startswith("/somewhere/nnx/nnscaler/tried/")


# --- against the table ----------------------------------------------------------------------------


def _case(case):
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    return one_op(f"aten.{target}", *args, **kwargs)


def _plain_strategies(graph, op) -> list[Strategy]:
    """Those in which the operator itself runs on the parts."""
    writer = _NumberWriter(2)
    write, whole = rule_for(op).write, writer.call(op)
    return [s for s in strategies_of(op, graph, 2)[1:] if write(op, s, writer) == whole]


def _plain_cases() -> list:
    cases = [(f"{case[0]}-{index}", *_case(case)) for index, case in enumerate(CASES)]
    return [
        pytest.param(graph, op, id=name)
        for name, graph, op in cases
        if runner(op) is not None
        and len(set(op.operands())) == len(op.operands())
        and _plain_strategies(graph, op)
    ]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("graph", "op"), _plain_cases())
def test_the_table_and_trying_agree(graph, op) -> None:
    metas = [graph.meta(name) for name in op.operands()]
    run = runner(op)
    bound = rule_for(op).index_bound(op, graph)
    trial = probe._trial(run, metas, tuple(m.hints for m in metas), "positive", 0, bound)
    plain = _plain_strategies(graph, op)
    for strategy in plain:
        assert not trial.disagreement(run, strategy, 2), strategy
    found = {(s.inputs, s.outputs) for s in probe.discover(op, graph, 2)}
    searched = {(s.inputs, s.outputs) for s in plain if _is_searched(s)}
    assert searched <= found or not found  # nothing is found of what may not be tried


def _is_searched(strategy: Strategy) -> bool:
    placements = (*strategy.inputs, *strategy.outputs)
    return P not in strategy.inputs and all(p.groups == 1 for p in placements)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (("aten.softmax.int", f(4, 8), -1), Strategy("", (S(1),), (S(1),))),
        (("aten.mul.Tensor", f(4, 8), f(4, 8)), Strategy("", (P, P), (P,))),
        (("aten.relu.default", f(4, 8)), Strategy("", (P,), (P,))),
        (("aten.mean.default", f(4, 8)), Strategy("", (S(0),), (P,))),
        (("aten.mm.default", f(4, 8), f(8, 4)), Strategy("", (R, R), (P,))),
        (("aten.mm.default", f(4, 8), f(8, 4)), Strategy("", (S(1), S(1)), (P,))),
        (("aten.neg.default", f(4, 8)), Strategy("", (S(0),), (R,))),
        (("aten.cumsum.default", ints(4, 8), 0), Strategy("", (S(0),), (S(0),))),  # without gradients
    ],
    ids=lambda value: str(value)[:40],
)
def test_trying_finds_what_is_wrong(call, wrong) -> None:
    graph, op = one_op(*call)
    run = runner(op)
    metas = [graph.meta(name) for name in op.operands()]
    trial = probe._trial(run, metas, tuple(m.hints for m in metas), "normal", 0)
    assert trial.disagreement(run, wrong, 2)


def test_a_gradient_that_a_part_gets_wrong_is_found() -> None:
    def run(operands):
        (x,) = operands
        return (x * 2 + (x.detach() - x) * (len(x) - 1),)  # the value is right, its slope depends on the rows

    trial = Trial.of(run, [torch.randn(4, 3, dtype=torch.float64)], torch.Generator().manual_seed(0))
    assert "gradient of operand 0" in trial.disagreement(run, Strategy("", (S(0),), (S(0),)), 2)
