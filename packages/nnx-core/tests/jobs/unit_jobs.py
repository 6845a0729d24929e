"""Jobs about single modules of nnx_core on several ranks: gradients, state, joint errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import nnx
from nnx_base.ranks import all_arrive, control_group, together
from nnx_base.shard import shard_of
from nnx_core.backend import Backend, Sample
from nnx_core.errors import CheckpointError, UnsupportedError
from nnx_core.optimizers.gradients import clip_gradients_by_norm, gradients_of, unscale_gradients
from nnx_core.optimizers.unsharded_optimizer import OwnerRanks
from nnx_core.view.modules import broadcast_module
from nnx_test_helpers.lightning_jobs import OPTIONS, full
from nnx_test_helpers.resume_jobs import Seen, run_cell
from nnx_test_helpers.training import MODELS, Net, Outcome, Run, train

CPU = torch.device("cpu")
SHAPES = {"plain": (5, 4), "rows": (3, 4), "columns": (2, 7), "whole": (6,), "hybrid": (5, 3), "scalar": ()}


def parameters(dtype: torch.dtype) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Parameters in every layout, with gradients, and the complete gradient of each."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else None
    layouts: dict[str, Any] = {"rows": (line, [Shard(0)]), "columns": (line, [Shard(1)])}
    layouts["whole"] = (line, [Replicate()])
    layouts["hybrid"] = (grid, [Replicate(), Shard(0)]) if grid else (line, [Shard(0)])
    made = {}
    for name, shape in SHAPES.items():
        gradient = torch.randn(shape, dtype=dtype)
        tensor: Any = gradient.clone()
        if name in layouts:
            mesh, placements = layouts[name]
            tensor = distribute_tensor(tensor, mesh, placements)
        parameter = nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor
        made[name] = (parameter, gradient)
    return made


def clip(dtype: torch.dtype, norm_type: float, max_norm: float) -> dict[str, Any]:
    """Clip gradients in every layout at once; the norm and the largest relative error against torch."""
    made = parameters(dtype)
    optimizer = torch.optim.SGD([parameter for parameter, _ in made.values()], lr=1.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})  # has no gradient
    norm = clip_gradients_by_norm(
        gradients_of(optimizer, world_size=dist.get_world_size()),
        max_norm=max_norm,
        norm_type=norm_type,
        device=CPU,
    )
    plain = [nn.Parameter(torch.zeros_like(gradient)) for _, gradient in made.values()]
    for parameter, (_, gradient) in zip(plain, made.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(plain, max_norm, norm_type=norm_type)
    errors = [
        float(((full(parameter.grad) - reference.grad).abs() / reference.grad.abs()).max())
        for (parameter, _), reference in zip(made.values(), plain, strict=True)
    ]
    empty = sum(g.local.numel() == 0 for g in gradients_of(optimizer, world_size=1))
    return {
        "norm": norm.item(),
        "expected": expected.item(),
        "error": max(errors),
        "dtype": str(norm.dtype),
        "empty": empty,
    }


def unscale(where: int) -> dict[str, float]:
    """Unscale gradients of which one, on one rank, is not finite."""
    made = parameters(torch.float32)
    optimizer = torch.optim.SGD([parameter for parameter, _ in made.values()], lr=1.0)
    gradients = gradients_of(optimizer, world_size=dist.get_world_size())
    if dist.get_rank() == where:
        next(g for g in gradients if g.local.numel() > 1).local.view(-1)[0] = float("nan")
    found = unscale_gradients(gradients, torch.tensor(0.25), CPU)
    whole = made["whole"]
    return {
        "found": found.item(),
        "unscaled": float((full(whole[0].grad) - 0.25 * whole[1]).abs().max()),
    }


def describe_shards() -> dict[str, Any]:
    """Return the result of `shard_of` for every layout on this rank, and check that its views are right."""
    made = parameters(torch.float32)
    report: dict[str, Any] = {}
    for name, (parameter, gradient) in made.items():
        shard = shard_of(parameter.grad)
        holds = all(
            torch.equal(view, gradient[box.slices]) for box, view in zip(shard.boxes, shard.data, strict=True)
        )
        for view in shard.data:
            view.zero_()
        local: Any = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        report[name] = {
            "boxes": [(box.offset, box.size) for box in shard.boxes],
            "holds": holds,
            "aliases": not bool(local.count_nonzero()),
            "bytes": shard.nbytes,
        }
    return report


# --- acting together ----------------------------------------------------------------------------------


def fail_together(failing: dict[int, str]) -> list[str]:
    """Return the error of a block that fails on some ranks, and show that the group still works."""
    errors: dict[str, Callable[[], Exception]] = {
        "value": lambda: ValueError("bad value"),
        "nnx": lambda: CheckpointError("torn.", remedy="Repair it."),
    }
    outcome = "nothing"
    try:
        with together(control_group(), doing="testing"):
            if dist.get_rank() in failing:
                raise errors[failing[dist.get_rank()]]()
    except nnx.NnxError as error:
        outcome = f"{type(error).__name__}: {error}"
    value = torch.tensor(1.0)
    dist.all_reduce(value)
    return [outcome, str(int(value))]


def arrive() -> dict[str, Any]:
    """All ranks arrive, twice; then one stays away."""
    report: dict[str, Any] = {"all": all_arrive("here", timeout=20)}
    if dist.get_rank() == 0:
        time.sleep(0.3)
    report["again"] = all_arrive("here", timeout=20)
    start = time.monotonic()
    if dist.get_rank() != 1:
        report["without rank 1"] = all_arrive("there", timeout=1)
        report["took"] = time.monotonic() - start
    else:
        time.sleep(2.5)  # until the others have gone
        report["without the others"] = all_arrive("there", timeout=20)
        report["took"] = time.monotonic() - start - 2.5
    return report


# --- buffers ------------------------------------------------------------------------------------------


class Buffers(Net):
    """Buffers of every kind that models have, different on every rank."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        me = int(os.environ["RANK"])
        self.register_buffer("rotary", torch.full((2, 2), complex(me, 1)))
        self.register_buffer("flags", torch.tensor([me == 0, me != 0]))
        self.register_buffer("transposed", torch.full((2, 3), me).T)
        self.register_buffer("narrow", torch.full((2,), float(me), dtype=torch.bfloat16))
        self.register_buffer("empty", torch.empty(0))


MODELS["buffers"] = Buffers


class Whole(Backend[None]):
    """The smallest engine: every rank holds everything."""

    def parallelize(self, module: nn.Module, sample: Sample) -> dict[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        return {}


def synchronize_views() -> dict[str, Any]:
    """Buffers that are views: a column of something larger, an expanded one, a transposed one."""
    me = float(dist.get_rank())
    around = torch.full((4, 3), me)
    base = torch.full((3, 1), me)
    module = nn.Module()
    module.register_buffer("column", around[:, 1])
    module.register_buffer("spread", base.expand(3, 500))
    module.register_buffer("transposed", torch.arange(6.0).view(2, 3).T + me)
    module.register_buffer("scalar", torch.tensor(me))
    backend = Whole(None)
    backend.sync_buffers(module)
    return {
        "buffers": {name: buffer.flatten().tolist() for name, buffer in module.named_buffers()},
        "around": around.tolist(),
        "addresses": module.column.data_ptr() == around[:, 1].data_ptr(),
    }


def train_buffers(run: Run) -> Outcome:
    """Train the model above."""
    return train(run)


# --- optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


class AnyOptimizer(Net):
    """Trained with the optimizer that its run names."""

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.run.optimizer]([p for p in self.parameters() if p.requires_grad])


MODELS["any optimizer"] = AnyOptimizer


def save_and_resume(kinds: list[str], folder: str, devices: int) -> dict[str, tuple[Seen, Seen]]:
    """Save with each optimizer at the second of four steps and resume."""
    results = {}
    for kind in kinds:
        path = str(Path(folder) / f"{kind}.ckpt")
        run = Run(options=OPTIONS, model="any optimizer", optimizer=kind, steps=4, devices=devices)
        first = run_cell(replace(run, save=path, save_at=2), 2)
        results[kind] = (first, run_cell(replace(run, resume=path), 2))
    return results


def partial_gradient() -> str:
    """The message for a gradient that nobody has reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    try:
        gradients_of(torch.optim.SGD([parameter], lr=1.0), world_size=dist.get_world_size())
    except UnsupportedError as error:
        return str(error)
    return "no error"


def broadcast_view_buffers() -> tuple[list[float], bool]:
    """FSDP's broadcast of a buffer that is one number seen 500 times.

    Returns:
        Its values afterwards, and whether the memory beside it is as it was.
    """
    rank = float(dist.get_rank())
    storage = torch.full((3,), rank)
    module = nn.Module()
    module.register_buffer("wide", storage[1:2].expand(500))
    broadcast_module(module)
    return module.wide.tolist(), storage[0].item() == rank and storage[2].item() == rank


def try_what_rank_0_cannot_describe() -> str:
    """Return the error on a rank if the engine fails to describe a parameter on rank 0 alone."""

    def shard(tensor: Tensor, **_: Any) -> Any:
        if dist.get_rank() == 0:
            raise UnsupportedError("it lies nowhere.", remedy="Put it somewhere.")
        return shard_of(tensor)

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    try:
        OwnerRanks(shard, CPU).setup([optimizer])
    except UnsupportedError as error:
        return str(error)
    return ""
