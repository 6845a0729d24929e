"""Chunks at world size 1: the user's own parameters over flat buffers, and copies beside computing.

`LocalEngine` lays a module out, hooks its modules, and takes everything down again. What happens in a step is
`local_step`'s, what a chunk does `local_chunk`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from nnx.backend import ParallelContext
from nnx.layout import Shard, shard_of
from nnx.materialize import materialize
from nnx_colossalai.chunks.engine import ChunkEngine, Unit
from nnx_colossalai.chunks.flat import is_chunkable, segments_of
from nnx_colossalai.chunks.local_chunk import LocalChunk
from nnx_colossalai.chunks.local_gradients import Gradients
from nnx_colossalai.chunks.local_hooks import Enter, Leave
from nnx_colossalai.chunks.local_step import Step
from nnx_colossalai.device.device import Device
from nnx_colossalai.plan.spec import Tier

__all__ = ["LocalEngine"]

T = TypeVar("T")
_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class LocalEngine(ChunkEngine):
    """Holds the chunks of one module in one process.

    Parameters that are no ordinary floating-point tensors stay outside of chunks, on the device. Those of
    layers with running statistics keep their dtype in a step: torch computes these in no two dtypes.

    Args:
        context: Where this process stands.
        device: Memory and copies.
        working_dtype: Of the weights that forward and backward compute with; None keeps the masters' own.
    """

    chunks: Sequence[LocalChunk]

    def __init__(
        self, context: ParallelContext, device: Device[Any], working_dtype: torch.dtype | None
    ) -> None:
        super().__init__(context, device, working_dtype)
        self._units: Sequence[Unit] = ()
        self._own_dtype: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._gradients = Gradients(device)
        self._step = Step((), self._gradients)

    # --- set up -------------------------------------------------------------------------------

    @override
    def parallelize(self, root: nn.Module, units: Sequence[Unit]) -> Mapping[nn.Parameter, nn.Parameter]:
        if self._units:
            return {}
        replaced = self._materialize(root, units)
        self._own_dtype = {
            id(parameter)
            for module in root.modules()
            if isinstance(module, _WITH_STATISTICS)
            for parameter in module.parameters(recurse=False)
        }
        self._units = units
        self.chunks = [self._make_chunk(unit, replaced) for unit in units]
        self._move_rest(root)
        self._connect(root)
        return replaced

    def _materialize(self, root: nn.Module, units: Sequence[Unit]) -> dict[nn.Parameter, nn.Parameter]:
        """Give parameters on the meta device values; what took their places is tied as they were."""
        places = [
            (module, name, parameter)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        for unit in units if places else ():
            device = torch.device("cpu") if unit.tier.steps_on_host else self.device.torch_device
            materialize(unit.module, device, name=unit.name)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for module, name, before in places:
            module._parameters[name] = replaced.setdefault(before, module._parameters[name])  # type: ignore[arg-type] # as before
        return replaced

    def _make_chunk(self, unit: Unit, replaced: Mapping[nn.Parameter, nn.Parameter]) -> LocalChunk:
        parameters = {name: replaced.get(one, one) for name, one in unit.parameters.items()}
        chunkable = {name: parameter for name, parameter in parameters.items() if is_chunkable(parameter)}
        segments = segments_of(chunkable, self._working_dtype_of)
        return LocalChunk(unit.name, unit.tier, segments, self.device, self._used)

    def _used(self, chunk: LocalChunk) -> None:
        self._step.used(chunk)

    def _working_dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        if self.working_dtype is None or parameter.dtype != torch.float32 or id(parameter) in self._own_dtype:
            return parameter.dtype
        return self.working_dtype

    def _move_rest(self, root: nn.Module) -> None:
        """Buffers and parameters outside of chunks are used where computing is."""
        device = self.device.torch_device
        in_chunks = {id(parameter) for chunk in self.chunks for parameter in chunk.masters.values()}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in in_chunks and not nn.parameter.is_lazy(parameter):
                    parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def _connect(self, root: nn.Module) -> None:
        """Hook every module whose forward uses working weights."""
        self._step = Step(self.chunks, self._gradients)
        used: dict[nn.Module, list[LocalChunk]] = {}
        owners: dict[int, LocalChunk] = {}
        for unit, chunk in zip(self._units, self.chunks, strict=True):
            if chunk.has_working:
                used.setdefault(unit.module, []).append(chunk)
                owners.update((id(parameter), chunk) for parameter in chunk.masters.values())
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                owner = owners.get(id(parameter))
                if owner is not None and owner not in used.setdefault(module, []):
                    used[module].append(owner)
        enters = {
            module: Enter(self._step, chunks, self._dtype_of_inputs(module))
            for module, chunks in used.items()
        }
        unit_of = {chunk: unit.module for unit, chunk in zip(self._units, self.chunks, strict=True)}
        for module, chunks in used.items():
            first = module.register_forward_pre_hook(enters[module], prepend=True, with_kwargs=True)
            last = module.register_forward_hook(Leave(self._step), always_call=True)
            self._hooks += (first, last)
            if module not in unit_of.values() and len(chunks) == 1 and not chunks[0].is_streamed:
                # Whatever its unit runs finds the chunk ready, and nothing of it changes meanwhile.
                before, after = enters[unit_of[chunks[0]]].inner
                before.append(first)
                after.append(last)
        # Two chunks on their way: one that is being added up, one that travels.
        self._gradients.limit = 2 * max((chunk.nbytes for chunk in self.chunks), default=0)

    def _dtype_of_inputs(self, module: nn.Module) -> torch.dtype | None:
        """What enters a unit is cast as FSDP2 does it, for layers that work in one dtype only."""
        for unit, chunk in zip(self._units, self.chunks, strict=True):
            if unit.module is module and any(
                slot.working is not None and slot.working.dtype == self.working_dtype for slot in chunk.slots
            ):
                return self.working_dtype
        return None

    def _disconnect(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._step.close()
        self._gradients.forget_staging()

    @override
    def unparallelize(self, root: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        self.finish()
        self._disconnect()
        for chunk in self.chunks:
            chunk.take_down()
        self._units, self.chunks = (), ()
        self._step = Step((), self._gradients)
        return {}

    @override
    def move(self, root: nn.Module, tiers: Mapping[str, Tier]) -> None:
        self.finish()
        self._disconnect()
        moves = [(chunk, tiers.get(chunk.name, chunk.tier)) for chunk in self.chunks]
        try:
            # First those that give device memory back.
            for chunk, tier in sorted(moves, key=lambda move: -_depth(move[1])):
                if tier is not chunk.tier:
                    chunk.move(tier)
        finally:
            self._connect(root)

    # --- step ---------------------------------------------------------------------------------

    @override
    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if not self._step.is_needed:
            return step(*args, **kwargs)
        is_manual = torch.is_grad_enabled() and not getattr(root, "automatic_optimization", True)
        result: T = self._step.run(step, args, kwargs, is_manual=is_manual)
        return result

    @override
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def finish(self) -> None:
        for chunk in self.chunks:
            chunk.finish()
        self._step.finish()

    @override
    def end_step(self) -> None:
        self._step.show_masters()

    @override
    def shard(self, tensor: torch.Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        return shard_of(tensor)


def _depth(tier: Tier) -> int:
    return list(Tier).index(tier)
