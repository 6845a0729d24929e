"""Two small engines, unlike FSDP and unlike each other, that test the backend contract.

`ColumnParallel` stands for a compiler: it asks for sample inputs, swaps parameters for local shards
that are plain tensors, replaces forwards, and makes ranks work on the same data.
`FlatMasters` stands for a chunk manager and for DeepSpeed: it owns flat float32 masters that no
module holds, takes module and optimizers together, and has its own backward, gradients and step.
``docs/backend-contract.md`` walks through both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.shard import Box, Shard, shard_of, shard_of_range
from nnx_checkpoint.reading.filling import fill_optimizer_tensors
from nnx_checkpoint.reading.state import ModelState, OptimizerState
from nnx_core.backend import Backend, NoOptions, Sample
from nnx_core.optimizers.gradients import Gradient

# --- a compiler's way ---------------------------------------------------------------------------


class _GatherColumns(torch.autograd.Function):
    """Concatenate the ranks' columns; each rank's gradient is its own columns of the result's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks that each used it for their columns."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed = grad.clone()
        dist.all_reduce(summed)
        return summed


class ColumnParallel(Backend[NoOptions]):
    """Splits the rows of every Linear's weight whose size allows it; all ranks read the same data."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(options)
        self._plain: dict[nn.Parameter, nn.Parameter] = {}
        self._split: list[nn.Linear] = []

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return 0, 1

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        args, kwargs = sample()
        self.sample_shapes = [tuple(value.shape) for value in (*args, *kwargs.values())]
        users = [p for m in module.modules() for p in m.parameters(recurse=False)]
        for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
            tied = sum(linear.weight is user for user in users) > 1
            if linear.out_features % self.context.world_size or tied:
                continue
            self._split.append(linear)
            for name, plain in list(linear.named_parameters()):
                rows = plain.detach().chunk(self.context.world_size)[self.context.rank].clone()
                local = nn.Parameter(rows, requires_grad=plain.requires_grad)
                setattr(linear, name, local)
                self._plain[local] = plain
            linear.forward = partial(self._forward, linear)  # type: ignore[method-assign]
        return {plain: local for local, plain in self._plain.items()}

    def _forward(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return _GatherColumns.apply(F.linear(_SumGradient.apply(x), linear.weight, linear.bias))

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        replaced = dict(self._plain)
        for linear in self._split:
            linear.__dict__.pop("forward", None)
            for name, local in list(linear.named_parameters()):
                parts = [torch.empty_like(local) for _ in range(self.context.world_size)]
                dist.all_gather(parts, local.detach())
                plain = self._plain[local]
                plain.data = torch.cat(parts)
                setattr(linear, name, plain)
        self._plain, self._split = {}, []
        return replaced

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """A split gradient is held once; other gradients are the same on every rank."""
        found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [Gradient(p.grad, 1 if p in self._plain else self.context.world_size) for p in found]

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        owner = tensor if parameter is None else parameter
        if owner not in self._plain or tensor.shape != owner.shape:
            return shard_of(tensor)
        rows, *rest = owner.shape
        offset = (self.context.rank * rows, *(0 for _ in rest))
        shape = (rows * self.context.world_size, *rest)
        return Shard(shape, tensor.dtype, (Box(offset, tuple(owner.shape)),), (tensor.detach(),))


# --- a chunk manager's way ----------------------------------------------------------------------


class _Chunk:
    """One param group, flattened in float32 and split over the ranks; this rank's part is `master`."""

    def __init__(self, group: dict[str, Any], rank: int, world_size: int) -> None:
        self.parameters: list[nn.Parameter] = list(group["params"])
        sizes = [parameter.numel() for parameter in self.parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.length = -(-sum(sizes) // world_size)
        self.begin = rank * self.length
        self.padding = self.length * world_size - sum(sizes)
        flat = self.flatten([parameter.detach() for parameter in self.parameters])
        self.master = nn.Parameter(flat.split(self.length)[rank].clone())

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([*(t.reshape(-1).float() for t in tensors), torch.zeros(self.padding)])

    def part(self, flat: Tensor, index: int) -> Shard:
        """Return one parameter's shard in a flat tensor with the master's layout."""
        parameter, start = self.parameters[index], self.starts[index]
        begin = max(self.begin, start)
        end = max(begin, min(self.begin + self.length, start + parameter.numel()))
        held = flat.detach()[begin - self.begin : end - self.begin]
        return shard_of_range(held, shape=parameter.shape, start=min(begin - start, parameter.numel()))


class FlatMasters(Backend[NoOptions]):
    """Plain parameters on the module; masters, gradients and optimizer state flat and split over ranks."""

    _sync = True

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        self._chunks: dict[Optimizer, list[_Chunk]] = {}
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """The user's optimizers keep their objects and group dicts, and step the masters instead."""
        for optimizer in optimizers:
            self._chunks[optimizer] = [
                _Chunk(group, self.context.rank, self.context.world_size) for group in optimizer.param_groups
            ]
            for group, chunk in zip(optimizer.param_groups, self._chunks[optimizer], strict=True):
                group["params"] = [chunk.master]

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        if self._sync:
            for chunk in self._all_chunks():
                self._reduce(chunk)

    def _all_chunks(self) -> list[_Chunk]:
        return [chunk for chunks in self._chunks.values() for chunk in chunks]

    def _reduce(self, chunk: _Chunk) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in chunk.parameters]
        flat = chunk.flatten(grads)
        dist.all_reduce(flat)
        chunk.master.grad = flat.split(chunk.length)[self.context.rank] / self.context.world_size
        for parameter in chunk.parameters:
            parameter.grad = None

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        return [Gradient(chunk.master.grad, 1) for chunk in self._chunks[optimizer]]

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = step(*args, **kwargs)
        for chunk in self._chunks[optimizer]:
            self._publish(chunk)
        return result

    @torch.no_grad()
    def _publish(self, chunk: _Chunk) -> None:
        parts = [torch.empty_like(chunk.master) for _ in range(self.context.world_size)]
        dist.all_gather(parts, chunk.master.detach())
        flat = torch.cat(parts)
        for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))

    # The masters are the weights: the module's own parameters are copies of them.

    def model_state(self, module: nn.Module) -> ModelState:
        state = super().model_state(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for chunk in self._all_chunks():
            for index, parameter in enumerate(chunk.parameters):
                state.tensors[names[id(parameter)]] = chunk.part(chunk.master, index)
        return state

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for chunk in self._all_chunks():
            self._publish(chunk)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        state: dict[str, dict[str, Any]] = {}
        groups = []
        for group, chunk in zip(optimizer.param_groups, self._chunks[optimizer], strict=True):
            hyper = {key: value for key, value in group.items() if key != "params"}
            groups.append({**hyper, "params": [names[id(p)] for p in chunk.parameters]})
            for index, parameter in enumerate(chunk.parameters):
                state[names[id(parameter)]] = {
                    key: chunk.part(value, index) if value.shape == chunk.master.shape else shard_of(value)
                    for key, value in optimizer.state.get(chunk.master, {}).items()
                }
        return OptimizerState(state=state, param_groups=groups)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        for group, chunk, theirs in zip(
            optimizer.param_groups, self._chunks[optimizer], saved["param_groups"], strict=True
        ):
            group.update({key: value for key, value in theirs.items() if key != "params"})
            for key, value in saved["state"].get(theirs["params"][0], {}).items():
                flat = key != "step"
                like = chunk.master if flat else torch.zeros(())
                optimizer.state[chunk.master][key] = torch.zeros_like(like.detach(), dtype=value.dtype)
        fill_optimizer_tensors(self.optimizer_state(module, optimizer), saved)


def register() -> None:
    """Make both engines strategies of this process."""
    import nnx

    for name, engine in (("column_parallel", ColumnParallel), ("flat_masters", FlatMasters)):
        if name not in nnx.StrategyRegistry:
            nnx.StrategyRegistry.register(name, engine, description="an engine of the tests")
