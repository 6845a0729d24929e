"""A compiled program that does not match the eager module is refused before its first step."""

import dataclasses

import pytest
import torch

from jobs.nnscaler_codegen_models import GPT, ConvNet, Mixture, images, tokens
from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler import self_check as checks
from nnx_nnscaler.ir.placement import P, Strategy
from nnx_nnscaler.plan.planning import plan_program, replicated_plan
from nnx_nnscaler.runtime.functions import Conversions
from nnx_nnscaler.self_check import checked_if_small, checked_up_to, self_check
from nnx_nnscaler.trace import trace_forward

CALL = ((tokens(), tokens(seed=1)), {})


def planned(module, call, policy="tp"):
    graph = trace_forward(module, *call)
    return graph, plan_program(graph, size=2, policy=policy)


@pytest.mark.full
def test_right_programs_pass_and_leave_the_module_alone():
    for module, call in ((GPT(layers=1, dropout=0.2), CALL), (ConvNet(), (images(), {}))):
        module.refers_to = object.__new__(Uncopied)
        graph, plan = planned(module, call, "data")
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        generator = torch.random.get_rng_state()
        self_check(module, graph, plan, call)
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert torch.equal(generator, torch.random.get_rng_state())


class Uncopied:
    """Stands for a trainer."""

    def __deepcopy__(self, memo):
        raise AssertionError("the check copied what the module refers to")


def wrong(graph):
    """The first layer norm's whole result is taken for one summand of several."""
    op = next(op for op in graph.ops if "layer_norm" in op.target)
    plan = replicated_plan(graph, 2)
    whole = Strategy("wrong", plan.choices[op.name].inputs, (P,))
    return dataclasses.replace(plan, choices={**plan.choices, op.name: whole})


def test_a_wrong_result_is_refused_and_names_the_operator():
    module = GPT(layers=1)
    graph = trace_forward(module, *CALL)
    with pytest.raises(PlanError, match=r"First operator that differs: \S*layer_norm\S* .*norm1") as caught:
        self_check(module, graph, wrong(graph), CALL)
    assert "nnscaler_codegen_models.py" in str(caught.value)
    assert "verify=False" in str(caught.value)


def test_a_wrong_gradient_is_refused_and_names_the_parameter(monkeypatch):
    module = GPT(layers=1)
    graph, plan = planned(module, CALL)
    for name in ("keep__all_reduce", "all_gather__reduce_scatter"):
        original = getattr(Conversions, name)
        monkeypatch.setattr(
            Conversions, name, lambda *args, call=original, **kwargs: call(*args, **kwargs).detach()
        )
    with pytest.raises(PlanError, match=r"(weight|bias) differs by .*\. Please report"):
        self_check(module, graph, plan, CALL)


def test_what_is_larger_than_asked_for_is_not_checked():
    module = GPT(layers=1)
    graph = trace_forward(module, *CALL)
    checked_up_to(100)(module, graph, wrong(graph), CALL)
    with pytest.raises(PlanError):
        checked_up_to(None)(module, graph, wrong(graph), CALL)


def test_submodules_that_run_whole_are_not_judged():
    module, call = Mixture(), ((torch.randn(4, 8),), {})
    graph, plan = planned(module, call, "data")
    self_check(module, graph, plan, call)


def on_meta():
    return GPT(layers=1).to("meta")  # as on a device other than the CPU


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("build", "call", "reason"),
    [
        (on_meta, CALL, "it is on meta, and the comparison runs on CPU only"),
        (lambda: GPT(layers=1).bfloat16(), CALL, "it computes in half precision"),
        (Mixture, ((torch.randn(4, 8),), {}), "falls back to eager"),
    ],
)
def test_a_check_that_was_asked_for_and_cannot_be_made_says_so(build, call, reason, caplog):
    module = build()
    graph, plan = planned(module, call, "data")
    caplog.clear()
    checked_if_small(module, graph, plan, call)
    assert not caplog.messages
    checked_up_to(None)(module, graph, plan, call)
    assert len(caplog.messages) == 1 and "verify=True" in caplog.text and reason in caplog.text


@pytest.mark.full
def test_a_program_for_calls_without_gradients_is_compared_without_them():
    module = GPT(layers=1)
    with torch.no_grad():
        graph, plan = planned(module, CALL)
        self_check(module, graph, plan, CALL)
        with pytest.raises(PlanError, match="layer_norm"):
            self_check(module, graph, wrong(graph), CALL)


def test_unless_told_a_small_model_with_a_wrong_program_is_refused_one(monkeypatch):
    module = GPT(layers=1)
    graph = trace_forward(module, *CALL)
    with pytest.raises(UnsupportedError, match="does not match the eager forward"):
        checked_if_small(module, graph, wrong(graph), CALL)
    monkeypatch.setattr(checks, "SMALL", 10_000)  # parameters alone are fewer
    assert sum(parameter.numel() for parameter in module.parameters()) * 2 < 10_000
    checked_if_small(module, graph, wrong(graph), CALL)
