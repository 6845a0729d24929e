"""Chunks that move down a tier between steps of two ranks take their optimizer state with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.spec import Tier
from nnx_conformance.pool import WorkerPool
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError

WIDTH = 16
STEPS = 4


class Layers(nn.Module):
    """Runs out of device memory in one forward, on request, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.dropout = nn.Dropout(0.2)
        self.asks = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.layers[:2](x).tanh())
        if self.asks:
            asks, self.asks = self.asks, 0
            raise DeviceMemoryError("The device is full.", asked=asks, used=2**20, allowed=2**20)
        out: Tensor = self.layers[2:](hidden)
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, fused=True),
}


def run(kinds: list[str], asks_at: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank, and return the exact outcome.

    Args:
        kinds: The kinds of the optimizers, which share the parameters and are passed one by one.
        asks_at: The step in which all ranks run out of memory; None: no step.
        options: The options of the strategy.
    """
    torch.manual_seed(5)
    module = Layers()
    device = SimDevice(2**20, delays=dist.get_rank())
    backend = ColossalAIBackend(ColossalAIOptions(**{"min_num_params": 10, "device": device, **options}))
    context = ParallelContext(
        device=torch.device("cpu"),
        precision="bf16-mixed",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    backend.setup(context)
    backend.parallelize(module, no_sample)
    parameters = list(module.parameters())
    optimizers = [OPTIMIZERS[kind](parameters[at :: len(kinds)]) for at, kind in enumerate(kinds)]
    for optimizer in optimizers:
        backend.setup_optimizers(module, [optimizer])
    (model,) = backend._models.values()
    tiers = [tiers_of(model)]
    torch.manual_seed(7)
    for step in range(STEPS):
        if step == asks_at:
            module.asks = model.placing.planned.memory.device // 2
        train(backend, module, optimizers, step)
        tiers.append(tiers_of(model))
    model.finish()
    masters = {name: local(one) for name, one in module.named_parameters()}
    held = {id(one) for one in module.parameters()}
    assert all(id(one) in held for optimizer in optimizers for one in optimizer.state), "of former masters"
    state = [
        {key: local(value) for key, value in optimizer.state[one].items()}
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    ]
    backend.unparallelize(module)
    backend.teardown()
    return {"masters": masters, "state": state, "tiers": tiers}


def train(backend: Any, module: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = backend.run_step(module, module, inputs).float().square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    backend.backward(module, loss)
    for optimizer in optimizers:
        backend.optimizer_step(optimizer, optimizer.step)


def tiers_of(model: Any) -> dict[str, str]:
    return {chunk.name: chunk.tier.value for chunk in model.engine.chunks}


def local(value: Any) -> Any:
    """Exactly, and as a pipe carries it."""
    whole = value.to_local() if isinstance(value, DTensor) else value
    return whole.detach().double().tolist()


def no_sample() -> Any:
    raise UnsupportedError("no sample here.")


def three_runs(kinds: list[str], overlap: str) -> dict[str, Any]:
    """One that moves, one that never did, and one that began where the first has ended."""
    options = {"overlap": overlap}
    moved = run(kinds, 2, options)
    end = {**options, "tiers": moved["tiers"][-1]}
    return {"moved": moved, "stayed": run(kinds, None, options), "began": run(kinds, None, end)}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("overlap", ["none", "exact"])
@pytest.mark.parametrize("kinds", [["adamw"], ["adamw", "sgd"]], ids=["one optimizer", "two, one by one"])
def test_moving_down_between_steps_of_two_ranks_changes_no_master_and_no_moment(
    pool: WorkerPool, kinds: list[str], overlap: str
) -> None:
    for rank in pool.run(three_runs, kinds, overlap, world_size=2, init="gloo", timeout=100):
        moved, stayed, began = rank["moved"], rank["stayed"], rank["began"]
        assert moved["tiers"][:3] == stayed["tiers"][:3], "it moved before it had to"
        assert not any(Tier(tier).steps_on_host for tier in moved["tiers"][2].values())
        assert any(Tier(tier).steps_on_host for tier in moved["tiers"][3].values())
        assert began["tiers"][0] == moved["tiers"][-1]
        for other in (stayed, began):
            assert moved["masters"] == other["masters"]
            assert moved["state"] == other["state"]
        assert all(any(map(any_nonzero, entries.values())) for entries in moved["state"])


def run_out_apart(more: int) -> str:
    """Run out of memory on both ranks; the second has begun some more collectives by then."""

    rank, begun = dist.get_rank(), list[Any]()
    module = Layers()
    module.asks = 1

    def before_it_fails(*_: Any) -> None:
        if module.asks:
            begun.extend(dist.all_reduce(torch.ones(1), async_op=True) for _ in range(rank * more))

    module.dropout.register_forward_hook(before_it_fails)
    backend = ColossalAIBackend(ColossalAIOptions(min_num_params=10, device=SimDevice(2**20)))
    backend.setup(
        ParallelContext(device=torch.device("cpu"), precision="bf16-mixed", rank=rank, world_size=2)
    )
    backend.parallelize(module, no_sample)
    try:
        backend.run_step(module, module, torch.ones(4, WIDTH))
    except DeviceMemoryError as error:
        return str(error)
    else:
        return "it moved down"
    finally:
        for work in begun or [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(more)]:
            work.wait()


@pytest.mark.full
def test_ranks_that_ran_out_of_memory_at_different_collectives_end_and_do_not_go_on(pool: WorkerPool) -> None:
    said = pool.run(run_out_apart, 0, init="gloo", timeout=30)
    assert said == ["it moved down"] * 2
    for words in pool.run(run_out_apart, 1, init="gloo", timeout=30):
        assert "cannot use lower tiers now: the other ranks had room, or ran out of memory elsewhere" in words


def any_nonzero(value: Any) -> bool:
    return any(map(any_nonzero, value)) if isinstance(value, list) else value != 0
