"""Short trainings under any mix of tiers on simulated devices, in the order of Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from jobs.colossalai_mix_model import (
    SCALE,
    STEPS,
    EvenNet,
    MixBlock,
    MixNet,
    Recipe,
    autocast,
    batch_of,
    digest,
    lower_rates,
    make_optimizer,
    states_of,
    whole,
)
from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.options import ColossalAIOptions
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.routing import route_optimizer_steps


@dataclass(frozen=True)
class Mix:
    """The tiers and the time of the step, for any recipe.

    Attributes:
        tiers: The tiers of the four blocks and of the root.
        overlap: The option of the same name.
        seed: The seed of the simulated device's delays; None: no delays.
        forgotten: The waits that a planted fault omits: ``compute_waits`` or ``host_waits``.
    """

    tiers: tuple[str, ...]
    overlap: str = "none"
    seed: int | None = None
    forgotten: str | None = None


def train_mixes_of_rank(cases: Sequence[tuple[Recipe, Mix]]) -> list[dict[str, Any]]:
    """Train all cases, and return the outcome of each on this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [train_mix(recipe, mix, rank, world_size) for recipe, mix in cases]


def no_sample() -> NoReturn:
    """Raise, so that the planner does not probe the step, because the mix fixes all placements."""
    raise UnsupportedError("there is no sample.")


def train_mix(recipe: Recipe, mix: Mix, rank: int, world_size: int) -> dict[str, Any]:
    """Train by the recipe, with the placements of the mix."""
    delays = None if mix.seed is None else 10 * mix.seed + rank
    # A forgotten wait shows where the copy takes longer than what comes between, on a busy machine too.
    slowest = 0.001 if mix.forgotten is None else 0.05
    device = SimDevice(64 * 2**20, delays=delays, max_delay=slowest)
    if mix.forgotten is not None:
        setattr(device, mix.forgotten, lambda event: None)
    backend = _backend(recipe, mix, device, rank, world_size)
    model = MixNet(recipe)
    backend.parallelize(model, no_sample)
    optimizer = make_optimizer(recipe, list(model.parameters()))
    backend.setup_optimizers(model, [optimizer])
    route_optimizer_steps([optimizer], backend, model)
    losses = _steps(recipe, backend, model, optimizer, rank)
    backend.state(model, [optimizer])  # waits, as a checkpoint does
    parameters = dict(model.named_parameters())
    left = {
        "masters": digest({name: whole(parameter) for name, parameter in parameters.items()}),
        "states": digest(states_of(optimizer, {one: name for name, one in parameters.items()})),
        "losses": losses,
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters.values()}),
        "tiers": {chunk.name: chunk.tier.value for chunk in backend._models[model].engine.chunks},
    }
    backend.unparallelize(model)
    left["plain"] = digest(dict(model.named_parameters()))
    left["tied"] = model.head.weight is model.embed.weight
    backend.teardown()
    device.close()
    return left


def _backend(
    recipe: Recipe,
    mix: Mix,
    device: SimDevice,
    rank: int,
    world_size: int,
    layer: type[nn.Module] = MixBlock,
    last: str = "",
) -> ColossalAIBackend:
    names = [f"blocks.{number}" for number in range(len(mix.tiers) - 1)] + [last]
    backend = ColossalAIBackend(
        ColossalAIOptions(
            device=device,
            tiers=dict(zip(names, mix.tiers, strict=True)),
            overlap=mix.overlap,
            auto_wrap_policy=layer,
            min_num_params=0,
            initial_scale=SCALE,
            hysteresis=1,
        )
    )
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            precision=recipe.precision,
        )
    )
    return backend


def _steps(
    recipe: Recipe, backend: ColossalAIBackend, model: MixNet, optimizer: Optimizer, rank: int
) -> list[str]:
    """Run one step in the order of Lightning's Trainer: forward, zero_grad, backward, clip, step."""
    scaler = None
    if recipe.precision == "16-mixed":
        scaler = backend.grad_scaler(torch.amp.GradScaler("cpu"))
    losses = []
    for step in range(STEPS):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with nullcontext() if last else backend.no_sync(model):
                with autocast(recipe):
                    loss = backend.run_step(model, model, *batch_of(recipe, step, rank, micro))
                if micro == 0:
                    optimizer.zero_grad()
                losses.append(loss.item().hex())
                loss = loss / recipe.accumulate
                backend.backward(model, loss if scaler is None else scaler.scale(loss))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if recipe.clip == "norm":
            backend.clip_grad_norm(optimizer, 0.5)
        elif recipe.clip == "value":
            backend.clip_grad_value(optimizer, 0.01)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        lower_rates(optimizer)
    return losses


def bytes_moved(recipe: Recipe, mix: Mix) -> list[tuple[int, int]]:
    """Bytes that go to the device and to the host in each step, once the first is over."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = SimDevice(64 * 2**20)
    backend = _backend(recipe, mix, device, rank, world_size, layer=nn.Linear, last="head")
    model = EvenNet()
    backend.parallelize(model, no_sample)
    optimizer = torch.optim.AdamW(model.parameters())
    backend.setup_optimizers(model, [optimizer])
    route_optimizer_steps([optimizer], backend, model)
    counts = []
    for step in range(STEPS):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with nullcontext() if last else backend.no_sync(model):
                with autocast(recipe):
                    loss = backend.run_step(model, model, torch.full((4, 8), step + 1.0))
                if micro == 0:
                    optimizer.zero_grad()
                backend.backward(model, loss)
        optimizer.step()
        backend.state(model, [optimizer])
        counts.append((device.traffic.to_device, device.traffic.to_host))
    backend.unparallelize(model)
    backend.teardown()
    device.close()
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(counts)]
