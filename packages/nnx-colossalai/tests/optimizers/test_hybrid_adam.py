"""Optimizers by their historical names step like torch's Adam and AdamW."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nnx_colossalai.optimizers.hybrid_adam import CPUAdam, FusedAdam, HybridAdam
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
