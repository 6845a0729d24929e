"""Plain loops over fairscale's engines and over torch's DDP, without Lightning."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import wrap as torch_wrap

from nnx_core.backend import Backend, ParallelContext

WEIGHTS = dict[str, Tensor]


class Layer(nn.Module):
    """A residual layer with an uneven number of elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        result: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return result


class Net(nn.Module):
    """Layers, a tied pair, a frozen weight, a scalar, a buffer, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.Sequential(*(Layer(7) for _ in range(3)))
        self.last = nn.Linear(7, 5, bias=False)
        self.back = nn.Linear(7, 5)
        self.back.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        """The prediction."""
        hidden = self.layers(self.first(x))
        result: Tensor = self.last(hidden) * self.scale + self.back(hidden) + self.shift
        return result


@dataclass(frozen=True)
class Loop:
    """The settings of a training.

    Attributes:
        engine: The engine: ``fsdp``, ``oss``, ``sharded`` or ``ddp``.
        options: The options of the engine.
        wrap: The origin of ``wrap()``, which marks the layers as units: ``torch`` or ``fairscale``.
        penalty: The factor of the squares of the layers' weights, read outside of the layers.
    """

    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    accumulate: int = 1
    clip: float = 0.0
    wrap: str = ""
    penalty: float = 0.0


def train(loop: Loop) -> tuple[list[float], WEIGHTS]:
    """Train, and return this rank's losses and, when all is taken off again, the weights."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if loop.engine == "ddp":
        return _train_with_ddp(loop)
    backend = make_backend(loop)
    backend.setup(
        ParallelContext(device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size())
    )
    module = Net()
    with backend.module_init_context():
        _wrap_layers(module, loop.wrap)
    names = [name for name, _ in module.named_parameters()]
    backend.parallelize(module, lambda: ((), {}))
    optimizer = optimizer_of(module)
    backend.setup_optimizers(module, [optimizer])
    losses = []
    for number, batch in enumerate(batches(loop)):
        is_last = (number + 1) % loop.accumulate == 0
        with nullcontext() if is_last else backend.no_sync(module):
            loss = backend.run_step(module, module, batch).square().mean() + _penalty(loop, module)
            if number % loop.accumulate == 0:
                optimizer.zero_grad()  # as Lightning does it: after forward, and to None
            backend.backward(module, loss)
        losses.append(loss.item())
        if is_last:
            if loop.clip:
                backend.clip_grad_norm(optimizer, loop.clip)
            backend.optimizer_step(optimizer, optimizer.step)
    assert [name for name, _ in module.named_parameters()] == names
    backend.unparallelize(module)
    backend.teardown()
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def _penalty(loop: Loop, module: Net) -> torch.Tensor | float:
    """Return the weighted squares of the weights; a loop without penalty reads none."""
    return loop.penalty and loop.penalty * sum(w.square().sum() for w in module.layers.parameters())


def _train_with_ddp(loop: Loop) -> tuple[list[float], WEIGHTS]:
    module = Net()
    parallel = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = optimizer_of(module)
    losses = []
    for number, batch in enumerate(batches(loop)):
        is_last = (number + 1) % loop.accumulate == 0
        if number % loop.accumulate == 0:
            optimizer.zero_grad()
        with nullcontext() if is_last else parallel.no_sync():
            loss = parallel(batch).square().mean() + _penalty(loop, module)
            loss.backward()
        losses.append(loss.item())
        if is_last:
            if loop.clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), loop.clip)
            optimizer.step()
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def train_with_fairscale_alone(loop: Loop, to_none: bool) -> list[float]:
    """ShardedDataParallel and OSS as fairscale documents them, with gradients dropped or zeroed in place."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Net()
    module.unused.requires_grad_(False)  # AdamW would decay it where its gradient is zero
    groups = optimizer_of(module).param_groups
    optimizer = OSS([{"params": g["params"], "lr": g["lr"]} for g in groups], torch.optim.AdamW, lr=0.01)
    parallel = ShardedDataParallel(module, optimizer)
    losses = []
    for batch in batches(loop):
        optimizer.zero_grad(set_to_none=to_none)
        loss = parallel(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_backend(loop: Loop) -> Backend[Any]:
    """The engine of a loop."""
    from nnx_fairscale.fsdp import FairscaleFSDPBackend
    from nnx_fairscale.oss import OSSBackend
    from nnx_fairscale.sharded import ShardedBackend

    engines: dict[str, Any] = {"fsdp": FairscaleFSDPBackend, "oss": OSSBackend, "sharded": ShardedBackend}
    engine = engines[loop.engine]
    made: Backend[Any] = engine(engine.Options(**loop.options))
    return made


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups, chosen by name."""
    named = list(module.named_parameters())
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": weights, "lr": 0.02}, {"params": others}], lr=0.01)


def batches(loop: Loop) -> list[Tensor]:
    """This rank's part of every global batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = torch.Generator().manual_seed(1)
    every = [torch.randn(2 * size, 5, generator=source) for _ in range(loop.steps * loop.accumulate)]
    return [batch[rank::size] for batch in every]


def _wrap_layers(module: Net, kind: str) -> None:
    if not kind:
        return
    from fairscale.nn.wrap import wrap as fairscale_wrap

    wrap = torch_wrap if kind == "torch" else fairscale_wrap
    for index, layer in enumerate(module.layers):
        module.layers[index] = wrap(layer)
        assert module.layers[index] is layer
        if dist.get_world_size() > 1:
            assert layer.linear.weight.ndim == 1, "it is sharded as soon as it is wrapped"


def patched_names() -> tuple[bool, bool, bool]:
    """Return True if the shim is in place before, while and after a backend is set up."""
    import fairscale.internal.reduce_scatter_bucketer as bucketer
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp

    from nnx_fairscale._fairscale_fsdp import HostShim

    while HostShim._users:  # jobs before this one with Fabric, which tears nothing down
        HostShim.remove()
    own = Tensor.record_stream
    backend = make_backend(Loop("fsdp"))

    def is_patched() -> bool:
        seen = {
            fsdp.torch is not torch,
            not fsdp.enable_nccl_base_collectives,
            not bucketer.enable_nccl_base_collectives,
            Tensor.record_stream is not own,
        }
        assert len(seen) == 1, "all of it or nothing"
        return seen.pop()

    before = is_patched()
    for _ in range(2):  # Trainer sets a backend up for every stage
        backend.setup(ParallelContext(device=torch.device("cpu")))
    during = is_patched()
    backend.teardown()
    return before, during, is_patched()


def save_shards(folder: str) -> WEIGHTS:
    """Save as programs did that used fairscale's FSDP by itself; returns the weights."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    from nnx_fairscale._fairscale_fsdp import HostShim

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Net()
    for parameter in module.parameters():  # which fairscale by itself does not shard with the others
        parameter.requires_grad_(True)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    settings: dict[str, Any] = {
        "process_group": dist.group.WORLD,
        "process_group_reduce_scatter": dist.group.WORLD,
        "compute_device": torch.device("cpu"),
    }
    HostShim.install()
    for index, layer in enumerate(module.layers):
        module.layers[index] = FullyShardedDataParallel(layer, **settings)
    root = FullyShardedDataParallel(module, **settings)
    held = {"weights": root.local_state_dict(), "meta": root.local_metadata_dict()}
    torch.save(held, Path(folder) / f"model-shard{dist.get_rank()}.pt")
    HostShim.remove()
    return weights
