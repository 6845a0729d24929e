"""Training by a handwritten loop without chunks.

It has float32 masters, working copies in the precision's dtype, gradients that are converted to float32 and
then accumulated, and one optimizer over the masters. It plays all ranks of a world one after the other.

torch's fused kernels round the remainder of a tensor, less than a vector of the processor, differently from
the rest. So a tensor that is stepped in slices can differ in the last bit from one that is stepped at once.
Therefore the optimizer here has the slices of the masters if ranks hold uneven slices, and the masters
themselves if the slices are even.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from jobs.colossalai_mix_model import (
    DTYPES,
    SCALE,
    STEPS,
    MixNet,
    Recipe,
    autocast,
    batch_of,
    digest,
    lower_rates,
    make_optimizer,
)


def train_plainly(recipes: Sequence[Recipe], world_size: int) -> list[dict[str, Any]]:
    """Train each recipe with the handwritten loop, and return the outcomes; losses are those of each rank."""
    return [_train_plainly(recipe, world_size) for recipe in recipes]


def _train_plainly(recipe: Recipe, world_size: int) -> dict[str, Any]:
    model = MixNet(recipe)
    _cast_inputs(model, DTYPES[recipe.precision])
    masters = {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    held = _Held(masters, 1 if recipe.even else world_size)
    optimizer = make_optimizer(recipe, list(held.parts), fused=True)
    scale = SCALE if recipe.precision == "16-mixed" else 1.0
    losses: list[list[str]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        of_ranks = []
        for rank in range(world_size):
            gradients: dict[str, Tensor] = {}
            for micro in range(recipe.accumulate):
                working = {name: _working(recipe, one, trained[name]) for name, one in masters.items()}
                with autocast(recipe):
                    loss = functional_call(model, working, batch_of(recipe, step, rank, micro))
                losses[rank].append(loss.item().hex())
                (loss / recipe.accumulate * scale).backward()
                _accumulate(gradients, working)
            of_ranks.append(gradients)
        finite = _reduce(masters, of_ranks, scale)
        if recipe.clip == "norm":
            _clip_by_norm(masters.values(), 0.5, world_size)
        elif recipe.clip == "value":
            for gradient in _gradients(masters.values()):
                gradient.clamp_(-0.01, 0.01)
        if finite:
            held.hand_out_gradients()
            optimizer.step()
        else:
            scale /= 2
        lower_rates(optimizer)
    return {"masters": digest(masters), "states": digest(held.states(optimizer)), "losses": losses}


class _Held:
    """The optimizer's parameters: the masters, or each rank's slice of them in the same memory."""

    def __init__(self, masters: Mapping[str, nn.Parameter], slices: int) -> None:
        self._masters, self._slices = masters, slices
        self.parts = {
            nn.Parameter(part): name for name, one in masters.items() for part in self._sliced(one.detach())
        }

    def _sliced(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.chunk(self._slices) if tensor.ndim else (tensor,)

    def hand_out_gradients(self) -> None:
        gradients = {
            name: None if one.grad is None else iter(self._sliced(one.grad))
            for name, one in self._masters.items()
        }
        for part, name in self.parts.items():
            of_master = gradients[name]
            part.grad = None if of_master is None else next(of_master)

    def states(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's state as if it had the masters."""
        values: dict[str, list[Tensor]] = {}
        for part, name in self.parts.items():
            for key, value in optimizer.state.get(part, {}).items():
                if isinstance(value, Tensor):
                    values.setdefault(f"{name}/{key}", []).append(value)
        return {key: torch.cat(found) if found[0].ndim else found[0] for key, found in values.items()}


def _cast_inputs(model: MixNet, dtype: torch.dtype | None) -> None:
    """Cast the inputs of each unit to the dtype of its weights, for layers without an autocast rule."""
    if dtype is None:
        return

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(one.to(dtype) if one.is_floating_point() else one for one in args)

    for unit in (model, *model.blocks):
        unit.register_forward_pre_hook(cast)


def _working(recipe: Recipe, master: Tensor, trained: bool) -> Tensor:
    copy = master.detach().to(DTYPES[recipe.precision] or torch.float32, copy=True)
    return copy.requires_grad_(trained)


def _accumulate(gradients: dict[str, Tensor], working: Mapping[str, Tensor]) -> None:
    for name, weights in working.items():
        if weights.grad is not None:
            gradient = weights.grad.float()
            gradients[name] = gradients[name] + gradient if name in gradients else gradient


def _reduce(
    masters: Mapping[str, nn.Parameter], of_ranks: Sequence[Mapping[str, Tensor]], scale: float
) -> bool:
    """Set the masters' gradients to the unscaled mean over the ranks; whether all of it is finite."""
    finite = True
    for name, master in masters.items():
        parts = [gradients[name] for gradients in of_ranks if name in gradients]
        master.grad = None
        if parts:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            master.grad = total / len(of_ranks) * (1.0 / scale)
            finite = finite and bool(master.grad.isfinite().all())
    return finite


def _gradients(masters: Iterable[nn.Parameter]) -> list[Tensor]:
    """In the order in which an optimizer has its parameters: those that decay first."""
    ordered = sorted(masters, key=lambda one: one.ndim <= 1)
    return [one.grad for one in ordered if one.grad is not None]


def _clip_by_norm(masters: Iterable[nn.Parameter], max_norm: float, world_size: int) -> None:
    """As ranks that hold a slice of each gradient add their squares up: that order decides the last bit."""
    gradients = _gradients(masters)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world_size):
        squares = []
        for gradient in gradients:
            if gradient.ndim == 0:  # every rank holds it
                squares.append(torch.linalg.vector_norm(gradient).pow(2) / world_size)
                continue
            slices = gradient.chunk(world_size)
            if rank < len(slices):
                squares.append(torch.linalg.vector_norm(slices[rank]).pow(2))
        total += torch.stack(squares).sum().double()
    factor = torch.clamp(max_norm / (total.float().pow(0.5) + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
