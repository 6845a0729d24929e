"""Short trainings under any mix of tiers on simulated devices, and the same by a loop written out by hand.

The hand-written loop knows nothing of chunks: float32 masters, working copies of them in the precision's
dtype, gradients that are converted to float32 and then accumulated, one optimizer over the masters. It plays
all ranks of a world one after the other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim import Optimizer

from nnx.backend import ParallelContext
from nnx.lightning.routing import route_optimizer_steps
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.device.simulated import SimDevice
from nnx_colossalai.options import ColossalAIOptions

WIDTH, VOCABULARY, LENGTH, SAMPLES, STEPS = 8, 11, 5, 3, 4
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SCALE = 2.0**10
Digest = dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever the tiers.

    Attributes:
        precision: Lightning's name.
        optimizer: ``adamw``, ``adam`` or ``momentum``.
        clip: By ``norm``, by ``value``, or not.
        accumulate: Micro batches of a step.
        overflow: Whether the loss of one step overflows, so that it is skipped.
    """

    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    clip: str | None = None
    accumulate: int = 1
    overflow: bool = False


@dataclass(frozen=True)
class Mix:
    """Where things lie and when they are stepped, whatever the recipe.

    Attributes:
        tiers: Of the four blocks and of the root.
        overlap: Of the options.
        seed: Of the simulated device's delays; None: no delays.
    """

    tiers: tuple[str, ...]
    overlap: str = "none"
    seed: int | None = None


class MixBlock(nn.Module):
    """A residual layer with uneven shapes; some parameters are frozen, some have no use.

    Args:
        frozen: Whether its second linear layer is not trained.
        unused: Whether it has a layer that no forward calls.
    """

    def __init__(self, *, frozen: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.down.requires_grad_(not frozen)
        if unused:
            self.spare = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MixNet(nn.Module):
    """Blocks between an embedding and a head that share their weight, a frozen layer, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([MixBlock(), MixBlock(frozen=True), MixBlock(unused=True), MixBlock()])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        x = self.still(self.embed(tokens)) * scale + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(recipe: Recipe, step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """The same for whoever asks."""
    random = torch.Generator().manual_seed(1000 * step + 100 * rank + micro)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=random)
    # One rank's overflow is everyone's.
    overflows = recipe.overflow and step == 1 and rank == 0
    return tokens, torch.tensor(float("inf") if overflows else 1.0)


def make_optimizer(recipe: Recipe, parameters: Sequence[nn.Parameter], **more: Any) -> Optimizer:
    """Over two groups, of which one decays."""
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **more)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    return kinds[recipe.optimizer](groups, lr=0.01, **more)


def lower_rates(optimizer: Optimizer) -> None:
    """What a scheduler does after a step, while the step may still be under way in the background."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.75 - 0.25 * number


def autocast(recipe: Recipe) -> Any:
    """As Lightning's precision plugin enters it around a step."""
    dtype = DTYPES[recipe.precision]
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def digest(tensors: Mapping[str, Tensor]) -> Digest:
    """A fingerprint of every tensor's bits."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


def states_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, by the parameter's name and its own."""
    return {
        f"{names[parameter]}/{key}": whole(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def whole(tensor: Tensor) -> Tensor:
    """Of all ranks."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


# --- with the strategy's backend --------------------------------------------------------------


def train_mixes_of_rank(cases: Sequence[tuple[Recipe, Mix]]) -> list[dict[str, Any]]:
    """What each training leaves behind on this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [train_mix(recipe, mix, rank, world_size) for recipe, mix in cases]


def train_mix(recipe: Recipe, mix: Mix, rank: int, world_size: int) -> dict[str, Any]:
    """Train by the recipe, with everything where the mix says."""
    names = [f"blocks.{number}" for number in range(4)] + [""]
    seed = None if mix.seed is None else 10 * mix.seed + rank
    device = SimDevice(64 * 2**20, delays=seed)
    options = ColossalAIOptions(
        device=device,
        tiers=dict(zip(names, mix.tiers, strict=True)),
        overlap=mix.overlap,
        auto_wrap_policy=MixBlock,
        min_num_params=0,
        initial_scale=SCALE,
        hysteresis=1,
    )
    backend = ColossalAIBackend(options)
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
    model = MixNet()
    backend.parallelize(model, lambda: (batch_of(recipe, 0, rank, 0), {}))
    optimizer = make_optimizer(recipe, list(model.parameters()))
    backend.setup_optimizers(model, [optimizer])
    route_optimizer_steps([optimizer], backend)
    losses, traffic = _steps(recipe, backend, model, optimizer, rank)
    backend.state(model, [optimizer])  # waits, as a checkpoint does
    parameters = dict(model.named_parameters())
    left = {
        "masters": digest({name: whole(parameter) for name, parameter in parameters.items()}),
        "states": digest(states_of(optimizer, {one: name for name, one in parameters.items()})),
        "losses": losses,
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters.values()}),
        "traffic": traffic,
    }
    backend.unparallelize(model)
    left["plain"] = digest(dict(model.named_parameters()))
    left["tied"] = model.head.weight is model.embed.weight
    backend.teardown()
    device.close()
    return left


def _steps(
    recipe: Recipe, backend: ColossalAIBackend, model: MixNet, optimizer: Optimizer, rank: int
) -> tuple[list[str], list[tuple[int, int]]]:
    """In the order of Lightning's Trainer: forward, zero_grad, backward, clip, step."""
    scaler = None
    if recipe.precision == "16-mixed":
        scaler = backend.grad_scaler(torch.amp.GradScaler("cpu"))
    losses, traffic = [], []
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
        device = backend.device
        traffic.append((device.traffic.to_device, device.traffic.to_host))
    return losses, traffic


# --- by hand ----------------------------------------------------------------------------------


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
