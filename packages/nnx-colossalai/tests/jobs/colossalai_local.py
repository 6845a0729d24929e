"""Models under `LocalEngine` on a simulated device, and the same models trained by a handwritten loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.simulated_device import SimDevice
from nnx_colossalai.chunks.chunk import Unit
from nnx_colossalai.chunks.local import LocalEngine
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext

TIERS = tuple(Tier)
WIDTH = 8
Step = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer whose parameters divide unevenly."""

    def __init__(self, inner: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layers(nn.Module):
    """Three layers with a head: units ``layers.0`` to ``layers.2``, and the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inputs(seed: int, *shape: int) -> Tensor:
    """Return the same inputs for every caller."""
    return torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(seed))


def lay_out(
    model: nn.Module,
    tiers: Tier | Mapping[str, Tier],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    device: SimDevice | None = None,
) -> LocalEngine:
    """An engine that holds a model.

    Args:
        model: Of any class.
        tiers: By unit's name, the root's (``""``) too; one for all units of `Layers`.
        dtype: Of working weights.
        device: One with random delays unless given.
    """
    if isinstance(tiers, Tier):
        tiers = dict.fromkeys(("layers.0", "layers.1", "layers.2", ""), tiers)
    device = device or SimDevice(2**24, delays=5, max_delay=0.0003)
    engine = LocalEngine(ParallelContext(device=torch.device("cpu")), device, dtype)
    engine.parallelize(model, units_of(model, tiers))
    return engine


def units_of(model: nn.Module, tiers: Mapping[str, Tier]) -> list[Unit]:
    """Units by name; a parameter belongs to the innermost one."""
    units, seen = [], set()
    for name in sorted(tiers, key=lambda name: -len(name.split(".")) if name else 1):
        module = model.get_submodule(name)
        parameters = {
            f"{name}.{key}" if name else key: one for key, one in module.named_parameters() if one not in seen
        }
        seen |= set(parameters.values())
        units.append(Unit(name, module, parameters, tiers[name]))
    order = {name: place for place, name in enumerate(tiers)}
    return sorted(units, key=lambda unit: (unit.name == "", order[unit.name]))


class ByHand:
    """Float32 masters beside a copy of the model that computes: the exact reference of chunks.

    Args:
        model: The model, which is copied.
        dtype: The dtype in which the copy computes.
        units: The names of modules whose inputs are cast to that dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, units: Any = ()) -> None:
        self.model = copy.deepcopy(model)
        self.masters = {
            name: nn.Parameter(one.detach().clone(), requires_grad=one.requires_grad)
            for name, one in model.named_parameters()
        }
        self.working = dict(self.model.named_parameters())
        self._dtypes = {
            name: dtype if dtype is not None and one.dtype == torch.float32 else one.dtype
            for name, one in self.working.items()
        }
        if dtype is not None:
            for name in units:
                self.model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args: tuple(one.to(dtype) if one.is_floating_point() else one for one in args)
                )

    def backward(self, loss: Callable[[nn.Module], Tensor]) -> float:
        """Forward and backward of one micro batch; the gradients are added to the masters'."""
        for name, one in self.working.items():
            one.grad = None
            one.data = self.masters[name].detach().to(self._dtypes[name], copy=True)
        value = loss(self.model)
        value.backward()
        for name, one in self.working.items():
            if one.grad is not None:
                master = self.masters[name]
                gradient = one.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
        return value.item()


def same_bits(model: nn.Module, masters: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters, or gradients, that differ."""
    wrong = []
    for name, one in model.named_parameters():
        master = masters[name]
        if one.dtype != master.dtype or not torch.equal(one.detach(), master.detach()):
            wrong.append(name)
        if (one.grad is None) != (master.grad is None):
            wrong.append(f"{name}.grad is {'not ' if master.grad is None else ''}there")
        elif one.grad is not None and not torch.equal(one.grad, master.grad):
            wrong.append(f"{name}.grad")
    return wrong


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose state shows every difference."""
    return torch.optim.AdamW(list(parameters), lr=0.05, weight_decay=0.1, fused=True)


def refresh(engine: LocalEngine) -> None:
    """Refresh the chunks as a stepper does after its step."""
    for chunk in engine.chunks:
        chunk.refresh()


UNITS = ("layers.0", "layers.1", "layers.2", "")
"""Of `Layers`: each layer, and the root."""


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss in float32."""
    value: Tensor = model(x).float().square().mean()
    return value


def both(laid_out: Any, seed: int, loss: Any = mean_square) -> None:
    """The same backward through the engine and by hand; `laid_out` is the fixture of that name."""
    model, engine, by_hand = laid_out
    engine.run_step(model, loss, model, inputs(seed)).backward()
    by_hand.backward(lambda copied: loss(copied, inputs(seed)))
