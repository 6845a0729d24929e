"""Optimizers with historical names step like torch's, with the right kernel for each parameter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_colossalai.optimizers import (
    CPUAdam,
    FusedAdam,
    HybridAdam,
    groups_for_step,
    needs_full_tensors,
    steps_each_parameter,
)
from nnx_colossalai.stepper import Stepper
from nnx_core.errors import OptionError

KINDS = [HybridAdam, CPUAdam, FusedAdam]


def train(kind: Any, **settings: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = kind(model.parameters(), **settings)
    for step in range(5):
        model.zero_grad()
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return list(model.parameters()), optimizer.state_dict()["state"]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_with_adamw_mode_they_are_adamw_and_without_it_adam(kind: Any, decay: float) -> None:
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay}
    assert_same(train(kind, **settings), train(torch.optim.AdamW, **settings))
    assert_same(train(kind, adamw_mode=False, **settings), train(torch.optim.Adam, **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_are_the_historical_ones(kind: Any) -> None:
    assert_same(train(kind), train(torch.optim.AdamW, lr=1e-3, weight_decay=0.0))


def test_arguments_come_in_the_historical_order() -> None:
    weight = [nn.Parameter(torch.ones(1))]
    hybrid = HybridAdam(weight, 0.1, True, (0.5, 0.6), 1e-3, 0.2, False, 0.0, None).param_groups[0]
    fused = FusedAdam(weight, 0.1, True, (0.5, 0.6), 1e-3, False, 0.2, True, False).param_groups[0]
    for group in (hybrid, fused):
        values = [group[key] for key in ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")]
        assert values == [0.1, (0.5, 0.6), 1e-3, 0.2, False]
    assert fused["amsgrad"]


def test_param_groups_named_parameters_copies_and_pickles_work() -> None:
    model = nn.Linear(2, 2)
    groups = HybridAdam([{"params": model.weight, "lr": 0.1}, {"params": model.bias}]).param_groups
    assert [group["lr"] for group in groups] == [0.1, 1e-3]
    assert HybridAdam(model.named_parameters()).param_groups[0]["param_names"] == ["weight", "bias"]
    for again in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        optimizer = again(FusedAdam(model.parameters(), lr=0.5))
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("chosen", "given", "kept"), [(True, None, False), (False, None, True), (False, True, False)]
)
def test_fused_adam_lets_gradients_go_as_chosen(chosen: bool, given: bool | None, kept: bool) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([weight], set_grad_none=chosen)
    weight.grad = torch.ones(1)
    optimizer.zero_grad(*([] if given is None else [given]))
    assert (weight.grad is not None) == kept
    assert not kept or not weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_bias_correction_are_refused(kind: Any) -> None:
    with pytest.raises(OptionError, match=rf"{kind.__name__}\(bias_correction=False\)"):
        kind([nn.Parameter(torch.ones(1))], bias_correction=False)


@pytest.mark.parametrize("kind", [HybridAdam, CPUAdam])
@pytest.mark.parametrize("asked", [{"nvme_offload_fraction": 0.5}, {"nvme_offload_dir": "/tmp"}])
def test_moments_on_disk_are_refused(kind: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="not on disk"):
        kind([nn.Parameter(torch.ones(1))], **asked)


# --- which kernel steps a parameter ---------------------------------------------------------------


def parameters(count: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(5, 4)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn(5, 4)
    return made


def kernels(optimizer: Optimizer) -> list[tuple[int, Any]]:
    return [(len(group["params"]), group["fused"]) for group in groups_for_step(optimizer)]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_host_memory_is_stepped_by_the_fused_kernel(kind: Callable[..., Optimizer]) -> None:
    optimizer, fused = (kind(parameters(), lr=0.1, **extra) for extra in ({}, {"fused": True}))
    group, before = optimizer.param_groups[0], dict(optimizer.param_groups[0])
    assert kernels(optimizer) == [(3, True)]
    for _ in range(3):
        Stepper([]).step(optimizer, optimizer.step)
        fused.step()
    assert optimizer.param_groups[0] is group
    assert group == before
    for mine, theirs in zip(group["params"], fused.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)


def test_a_group_that_is_fused_by_choice_is_divided_only_where_its_kernel_needs_it() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, fused=True)
    assert kernels(optimizer) == [(3, True)]
    optimizer.state[optimizer.param_groups[0]["params"][1]]["momentum_buffer"] = torch.zeros(5, 4)
    assert kernels(optimizer) == [(1, True), (2, True)]


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"foreach": False}])
def test_the_users_own_choice_of_a_kernel_stands(choice: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW(parameters(), **choice)
    assert groups_for_step(optimizer) == optimizer.param_groups
    assert groups_for_step(optimizer)[0] is optimizer.param_groups[0]


def test_an_optimizer_without_a_fused_kernel_keeps_its_groups() -> None:
    optimizer = torch.optim.NAdam(parameters())
    assert groups_for_step(optimizer)[0] is optimizer.param_groups[0]


def test_sparse_gradients_and_other_dtypes_are_left_to_the_default_kernel() -> None:
    given = parameters()
    given[0].grad = torch.eye(5, 4).to_sparse()
    given.append(nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    optimizer = torch.optim.SGD(given, lr=0.1)
    assert kernels(optimizer) == [(2, True), (2, None)]
    expected = given[0].detach() - 0.1 * torch.eye(5, 4)
    Stepper([]).step(optimizer, optimizer.step)
    torch.testing.assert_close(given[0].detach(), expected)


def test_parameters_that_join_later_get_momentum_beside_those_that_have_it() -> None:
    given, alone = parameters(), parameters()
    for each in (given, alone):
        each[1].grad = None
    together = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    apart = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True) for parameter in alone]
    for step in range(3):
        for each in (given, alone):
            each[1].grad = torch.ones(5, 4) if step else None
        Stepper([]).step(together, together.step)
        for optimizer in apart:
            optimizer.step()
    for mine, theirs in zip(given, alone, strict=True):
        assert torch.equal(mine, theirs)


def test_no_closure_and_no_gradients_change_nothing() -> None:
    given = parameters()
    before = [parameter.detach().clone() for parameter in given]
    optimizer = torch.optim.AdamW(given)
    optimizer.zero_grad()
    assert Stepper([]).step(optimizer, optimizer.step) is None
    assert all(torch.equal(parameter, old) for parameter, old in zip(given, before, strict=True))


@pytest.mark.parametrize(
    ("kind", "whole"), [(torch.optim.Muon, True), (torch.optim.Adafactor, True), (torch.optim.AdamW, False)]
)
def test_optimizers_that_look_across_a_tensor_are_known(kind: Callable[..., Optimizer], whole: bool) -> None:
    optimizer = kind(parameters())
    assert needs_full_tensors(optimizer) == whole
    assert steps_each_parameter(optimizer.step)


def test_a_step_below_wrappers_is_recognised() -> None:
    optimizer = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the step
    assert steps_each_parameter(optimizer.step)
    assert not steps_each_parameter(lambda: optimizer.step())
    assert not steps_each_parameter(torch.optim.SparseAdam(parameters()).step)


def test_a_fused_step_gives_a_parameter_the_same_bits_whatever_shares_its_kernel() -> None:
    together = parameters(6)
    apart = parameters(6)

    def step(groups: list[list[nn.Parameter]]) -> list[Tensor]:
        for group in groups:
            optimizer = torch.optim.AdamW(group, lr=0.1)
            for _ in range(3):
                Stepper([]).step(optimizer, optimizer.step)
        return [parameter.detach() for group in groups for parameter in group]

    for mine, theirs in zip(step([together]), step([[p] for p in apart]), strict=True):
        assert torch.equal(mine, theirs)
