"""Training by a loop that is written out by hand and knows nothing of chunks.

Float32 masters, working copies of them in the precision's dtype, gradients that are converted to float32 and
then accumulated, one optimizer over the masters. It plays all ranks of a world one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    states_of,
)


def train_plainly(recipes: Sequence[Recipe], world_size: int) -> list[dict[str, Any]]:
    """What the hand-written loop leaves behind, for each recipe; losses are those of each rank."""
    return [_train_plainly(recipe, world_size) for recipe in recipes]


def _train_plainly(recipe: Recipe, world_size: int) -> dict[str, Any]:
    model = MixNet()
    _cast_inputs(model, DTYPES[recipe.precision])
    masters = {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    optimizer = make_optimizer(recipe, list(masters.values()), fused=True)
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
            _clip_by_norm(optimizer, 0.5, world_size)
        elif recipe.clip == "value":
            _each_gradient(optimizer, lambda gradient: gradient.clamp_(-0.01, 0.01))
        if finite:
            optimizer.step()
        else:
            scale /= 2
        lower_rates(optimizer)
    names = {one: name for name, one in masters.items()}
    return {"masters": digest(masters), "states": digest(states_of(optimizer, names)), "losses": losses}


def _cast_inputs(model: MixNet, dtype: torch.dtype | None) -> None:
    """What enters a unit has the dtype of its weights, so that layers without an autocast rule work."""
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


def _each_gradient(optimizer: Optimizer, change: Callable[[Tensor], object]) -> None:
    for gradient in _gradients(optimizer):
        change(gradient)


def _gradients(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from (one.grad for one in group["params"] if one.grad is not None)


def _clip_by_norm(optimizer: Optimizer, max_norm: float, world_size: int) -> None:
    """As ranks that hold a slice of each gradient add their squares up: that order decides the last bit."""
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world_size):
        squares = []
        for gradient in _gradients(optimizer):
            if gradient.ndim == 0:  # every rank holds it
                squares.append(torch.linalg.vector_norm(gradient).pow(2) / world_size)
                continue
            slices = gradient.chunk(world_size)
            if rank < len(slices):
                squares.append(torch.linalg.vector_norm(slices[rank]).pow(2))
        total += torch.stack(squares).sum().double()
    factor = torch.clamp(max_norm / (total.float().pow(0.5) + 1e-6), max=1.0)
    _each_gradient(optimizer, lambda gradient: gradient.mul_(factor))
