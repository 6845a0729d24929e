"""The stepper over chunks in host memory, against the same optimizer stepping by itself."""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from nnx.errors import OptionError
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.optimizers.hybrid_adam import HybridAdam
from nnx_colossalai.optimizers.overlap import OptimizerStepError
from nnx_colossalai.optimizers.stepping import Stepper
from nnx_colossalai.plan.spec import Tier
from torch import Tensor, nn
from torch.optim import Optimizer

pytestmark = pytest.mark.usefixtures("deadline")


@pytest.fixture
def deadline() -> Any:
    """A wait that never ends fails the test instead of the session."""
    import faulthandler

    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Layer(Chunk):
    """The least chunk there can be: masters, and bfloat16 copies of them that a forward reads."""

    def __init__(self, index: int, module: nn.Module, delays: random.Random | None = None) -> None:
        self.index, self.name, self.tier = index, f"layers.{index}", Tier.OFFLOADED
        self.masters: Mapping[str, nn.Parameter] = {
            f"{self.name}.{name}": parameter for name, parameter in module.named_parameters()
        }
        self.working = {name: master.detach().bfloat16() for name, master in self.masters.items()}
        self.delays = delays
        self.pending: Callable[[], None] | None = None
        self.refreshed_in: list[str] = []

    def refresh(self) -> None:
        if self.delays is not None:
            time.sleep(self.delays.random() * 0.003)
        for name, master in self.masters.items():
            self.working[name].copy_(master.detach())
        self.refreshed_in.append(threading.current_thread().name)

    def set_pending(self, wait: Callable[[], None] | None) -> None:
        self.pending = wait

    def use(self) -> None:
        """What a forward does before it reads the working weights."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()


class Model:
    """Four layers, computed with their working weights; gradients go to the masters in float32."""

    def __init__(self, delays: random.Random | None = None) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.chunks = [Layer(index, layer, delays) for index, layer in enumerate(self.layers)]

    def loss_and_backward(self, step: int) -> Tensor:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        used = []
        for chunk in self.chunks:
            chunk.use()
            weight, bias = (w.clone().requires_grad_() for w in chunk.working.values())
            x = torch.tanh(nn.functional.linear(x.bfloat16(), weight, bias))
            used.append((weight, bias))
        loss = x.float().square().mean()
        loss.backward()
        for chunk, working in zip(self.chunks, used, strict=True):
            for master, weight in zip(chunk.masters.values(), working, strict=True):
                grad = weight.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
        return loss.detach()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.layers.parameters())


Make = Callable[[list[nn.Parameter]], Optimizer]


def train(make: Make, *, overlap: str | None, steps: int = 6, delays: int | None = None) -> dict[str, Any]:
    """Train; without `overlap` the optimizer steps by itself, and the copies are made after it."""
    model = Model(None if delays is None else random.Random(delays))
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
