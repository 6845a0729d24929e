"""The stepper over chunks in host memory, against the same optimizer stepping by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jobs.colossalai_layers import Layer, Model
from nnx_colossalai.optimizers.hybrid_adam import HybridAdam
from nnx_colossalai.optimizers.stepping import Stepper

pytestmark = pytest.mark.timeout(60)

Make = Callable[[list[nn.Parameter]], Optimizer]


def train(make: Make, *, overlap: str | None, steps: int = 6, delays: int | None = None) -> dict[str, Any]:
    """Train; without `overlap` the optimizer steps by itself, and the copies are made after it."""
    draw = None if delays is None else random.Random(delays)
    model = Model(partial(Layer, delays=draw))
    optimizer = make(model.parameters())
    stepper = None if overlap is None else Stepper(model.chunks, overlap=overlap)  # type: ignore[arg-type]
    if stepper is not None:
        stepper.setup_optimizers([optimizer])
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            loss = model.loss_and_backward(step)
            return loss

        if stepper is None:
            losses.append(optimizer.step(closure))
            for chunk in model.chunks:
                chunk.refresh()
        else:
            losses.append(stepper.step(optimizer, optimizer.step, closure))
        optimizer.zero_grad()
    if stepper is not None:
        stepper.finish()
    state = optimizer.state_dict()["state"]
    if stepper is not None:
        stepper.close()
    return {
        "losses": losses,
        "masters": [p.detach().clone() for p in model.parameters()],
        "working": [w for chunk in model.chunks for w in chunk.working.values()],
        "state": state,
        "threads": {name for chunk in model.chunks for name in chunk.refreshed_in},
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("losses", "masters", "working"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
    assert one["state"].keys() == other["state"].keys()
    for index, entries in one["state"].items():
        assert entries.keys() == other["state"][index].keys()
        for name, value in entries.items():
            torch.testing.assert_close(value, other["state"][index][name], rtol=0, atol=0)


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    weights = [p for p in parameters if p.dim() > 1]
    biases = [p for p in parameters if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3}]
    return torch.optim.AdamW(groups, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "hybrid": lambda p: _fused(HybridAdam(p, lr=1e-2, weight_decay=0.1)),
    "two_groups": two_groups,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def _fused(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


@pytest.mark.parametrize("overlap", ["none", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_ends_at_the_bits_of_its_own_step(name: str, overlap: str) -> None:
    trained = train(OPTIMIZERS[name], overlap=overlap)
    assert_same(trained, train(OPTIMIZERS[name], overlap=None))
    in_background = {thread.startswith("nnx-optimizer-step") for thread in trained["threads"]}
    assert in_background == {overlap == "exact"}


@pytest.mark.parametrize("seed", range(5))
def test_random_delays_change_nothing(seed: int) -> None:
    assert_same(
        train(two_groups, overlap="exact", delays=seed, steps=10), train(two_groups, overlap=None, steps=10)
    )
