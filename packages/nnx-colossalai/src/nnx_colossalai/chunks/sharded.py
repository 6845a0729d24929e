"""Run a chunked model above world size 1: every chunk is one FSDP2 unit, in the memory of its tier.

In all tiers each rank holds its shard of the masters as DTensors, and FSDP2 gathers working weights. It
reduces gradients in float32 under a mixed precision: it sums them over the ranks, divides by the number of
ranks, and adds the result to earlier gradients. In the tiers on the device FSDP2 gathers from the masters.
In the others it gathers from a copy in the working dtype: on the device (offloaded) or in host memory
(streamed).

This module has the engine; `nnx_fsdp.sharding` shards the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from nnx_base.clean_up import clean_up, clean_up_after_error
from nnx_base.ranks import all_gather_object, control_group, together
from nnx_colossalai._torch_compat import (
    Gathered,
    WaitingDTensor,
    gathered_together,
    is_under_way,
    recover,
)
from nnx_colossalai.chunks.chunk import Chunk, ChunkEngine, Unit
from nnx_colossalai.chunks.sharded_parts import CastParameters, sharded_segments
from nnx_colossalai.device import Device
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext
from nnx_core.parts_backend import View
from nnx_core.view.guard import is_guarded, show_plain, show_unsharded
from nnx_core.view.hidden_optimizer_state import StateParts
from nnx_fsdp._torch_compat import can_be_sharded
from nnx_fsdp.meshes import mesh_of
from nnx_fsdp.sharding import ShardedUnit, Sharding

__all__ = ["ShardedChunk", "ShardedEngine"]


T = TypeVar("T")


class ShardedEngine(ChunkEngine):
    """Holds the chunks of one module on several ranks.

    In `no_sync` each rank accumulates unreduced gradients on its device, if those of the full model take at
    most a sixteenth of its memory. Otherwise every backward reduces them, because they would not fit. The
    rule ignores tiers, so that all tiers give the same numbers.
    """

    def __init__(
        self, context: ParallelContext, device: Device[Any], working_dtype: torch.dtype | None
    ) -> None:
        super().__init__(context, device, working_dtype)
        self.chunks: Sequence[ShardedChunk] = ()
        self._sharding = Sharding(
            mesh_of(context.device.type, (context.world_size,), names=("shard",)),
            context.device,
            mixed_precision=None
            if working_dtype is None
            else MixedPrecisionPolicy(param_dtype=working_dtype, reduce_dtype=torch.float32),
            sum_gradients=True,  # one order of operations, on every backend of the process group
            is_watched=lambda: self.is_watched and context.world_size > 1,
        )
        self._root: nn.Module | None = None
        self._order: dict[ShardedChunk, None] = {}
        self._casts = CastParameters((), working_dtype)
        self._accumulates_complete = False
        self._is_new = True

    @override
    def parallelize(self, root: nn.Module, units: Sequence[Unit]) -> Mapping[nn.Parameter, nn.Parameter]:
        if self._root is not None:
            return {}
        replaced = self._sharding.shard(
            root,
            [
                ShardedUnit(unit.name, unit.module, unit.tier is not Tier.GATHERED)
                for unit in units
                if unit.module is not root and can_be_sharded(unit.module)
            ],
            reshard_root=units[-1].tier is not Tier.GATHERED,
        )
        self._root = root
        self._casts = CastParameters(root.modules(), self.working_dtype)
        self._accumulates_complete = self._has_room_for_complete_gradients(root)
        self.chunks = self._make_chunks(root, units)
        moved: dict[nn.Parameter, nn.Parameter] = {}
        with together(control_group(), doing="placing chunks"):
            for chunk in self.chunks:
                moved |= self._place(root, chunk, chunk.tier)
        self._name_masters(root)
        return {old: moved.get(new, new) for old, new in replaced.items()}

    def _has_room_for_complete_gradients(self, root: nn.Module) -> bool:
        """Return True if every device has room for unreduced gradients of the full model. Collective."""
        capacity = min(all_gather_object(self.device.capacity, control_group()))
        needed = sum(p.numel() * p.element_size() for p in root.parameters() if p.requires_grad)
        return needed * 16 <= capacity

    def _make_chunks(self, root: nn.Module, units: Sequence[Unit]) -> list[ShardedChunk]:
        unit_of = {unit.module: unit for unit in units}
        gathered: dict[str, list[Gathered]] = {unit.name: [] for unit in units}
        for module in root.modules():
            if isinstance(module, FSDPModule):
                unit = unit_of.get(module, units[-1])  # children of a root that cannot be sharded
                gathered[unit.name] += gathered_together(module)
        return [
            ShardedChunk(
                unit.name,
                unit.tier,
                gathered[unit.name],
                device=self.device,
                working_dtype=self.working_dtype,
                used=self._use,
                ending=self._casts.when_backward_has_ended,
            )
            for unit in units
            if gathered[unit.name]
        ]

    def _place(self, root: nn.Module, chunk: ShardedChunk, tier: Tier) -> dict[nn.Parameter, nn.Parameter]:
        replaced = chunk.place(tier)
        self._sharding.replace(root, replaced)
        return replaced

    def _name_masters(self, root: nn.Module) -> None:
        names = {parameter: name for name, parameter in root.named_parameters()}
        for index, chunk in enumerate(self.chunks):
            chunk.index = index
            own = chunk.parameters
            chunk.masters = {name: parameter for parameter, name in names.items() if parameter in own}

    @override
    def unparallelize(self, root: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        if self._root is not None:
            self.finish()
        self._casts.remove()
        replaced = self._sharding.unshard(root, self.at_end)
        for chunk in self.chunks:
            chunk.let_go()
        self.chunks, self._root = (), None
        self._order.clear()
        return replaced

    @override
    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._root is None:
            return step(*args, **kwargs)
        self._recover()
        if self._is_new:
            self._try_memory()
        self._order.clear()
        self._casts.hide()  # a forward without a backward has left them shown
        self._casts.show()
        with (
            clean_up("numbering chunks", self._number_chunks),
            clean_up_after_error("resetting FSDP2", partial(recover, self._root), self._casts.hide),
        ):
            result = self._sharding.run_step(root, step, *args, **kwargs)
        if not torch.is_grad_enabled():
            self._casts.hide()
        return result

    def _try_memory(self) -> None:
        """Raise an error on every rank if the weights of a step do not fit on one of them. Collective.

        Within a step only one rank would raise it, and the others would hang in FSDP2's collectives.
        """
        kept = sum(chunk.complete_bytes for chunk in self.chunks if chunk.tier is Tier.GATHERED)
        passing = [chunk.complete_bytes for chunk in self.chunks if chunk.tier is not Tier.GATHERED]
        with together(control_group(), doing="allocating the weights of a step"):
            self.device.release(self.device.empty(kept + max(passing, default=0), torch.uint8))
        self._is_new = False

    def _use(self, chunk: ShardedChunk) -> None:
        self._order.setdefault(chunk)
        self._casts.show()

    def _number_chunks(self) -> None:
        """Number chunks in the order of this forward; unused ones follow in their former order."""
        rest = sorted((chunk for chunk in self.chunks if chunk not in self._order), key=lambda c: c.index)
        for index, chunk in enumerate([*self._order, *rest]):
            chunk.index = index

    def _recover(self) -> None:
        """Reset FSDP2 after an error in a backward, which runs outside of `run_step`."""
        if self._root is not None and is_under_way(self._root):
            recover(self._root)

    @override
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return self._sharding.no_sync(root) if self._accumulates_complete else nullcontext()

    @override
    def backward_pass(self) -> AbstractContextManager[Any]:
        return self._sharding.backward_pass()

    @override
    def views(self) -> Iterable[View]:
        return self._sharding.views()

    @override
    def written(self, root: nn.Module) -> Mapping[str, int]:
        return self._sharding.written(root)

    @override
    def state_parts(self, refusal: Callable[[Optimizer], str | None]) -> StateParts:
        return self._sharding.state_parts(refusal)

    @override
    def end_step(self) -> None:
        if self._root is None or is_under_way(self._root):
            return
        self._casts.hide()
        self._sharding.free(self._root)

    @override
    def finish(self) -> None:
        if self._root is None:
            return
        self._recover()
        self._casts.hide()
        self._sharding.flush()
        for chunk in self.chunks:
            chunk.settle()
        self._sharding.free(self._root)

    @override
    def move(self, root: nn.Module, tiers: Mapping[str, Tier]) -> None:
        self.finish()
        with together(control_group(), doing="moving chunks"):
            for chunk in self.chunks:
                tier = tiers.get(chunk.name, chunk.tier)
                if tier is not chunk.tier:
                    self._place(root, chunk, tier)
        self._is_new = True


class ShardedChunk(Chunk):
    """The parameters of one unit of the plan, with DTensors as masters.

    FSDP2 gathers, frees, reduces and accumulates. The chunk chooses the memory that FSDP2 gathers from, and
    keeps it equal to the masters.

    Args:
        name: The name in the plan.
        tier: The tier in the plan.
        gathered: The parameter groups that FSDP2 gathers. There are several if the root's class cannot be
            sharded, because its children are sharded instead.
        device: The device that allocates and copies.
        working_dtype: The dtype of the weights that forward and backward compute with; None keeps the
            masters' dtype.
        used: A function that is called with the chunk when a forward uses it.
        ending: A function that is called inside of every backward.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        gathered: list[Gathered],
        *,
        device: Device[Any],
        working_dtype: torch.dtype | None,
        used: Callable[[ShardedChunk], None],
        ending: Callable[[], None],
    ) -> None:
        self.index, self.name, self.tier = 0, name, tier
        self.masters: Mapping[str, nn.Parameter] = {}
        self._device, self._used = device, used
        self._segments = sharded_segments(gathered, device, working_dtype)
        self._gathered = gathered
        self._gathered_versions: list[int] = []
        self._wait: Callable[[], None] | None = None
        self._events: list[Any] = []
        for group in gathered:
            group.watch(partial(self._before_gather, group), self._count_gathered)
            group.watch_backward(ending, self._count_reduced)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameter objects of the module and the optimizers."""
        return {parameter for segment in self._segments for parameter in segment.parameters}

    @property
    def complete_bytes(self) -> int:
        """The bytes of the gathered weights on the device."""
        return sum(segment.complete_bytes for segment in self._segments)

    def place(self, tier: Tier) -> dict[nn.Parameter, nn.Parameter]:
        """Move the chunk to the memory of a tier.

        Returns:
            The new parameter of each replaced one.
        """
        self.settle()
        self.tier = tier
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for segment in self._segments:
            replaced |= segment.place(tier)
        for group in self._gathered:
            group.keep(tier is Tier.GATHERED)
        self.masters = {name: replaced.get(master, master) for name, master in self.masters.items()}
        self.refresh()
        return replaced

    def settle(self) -> None:
        """Wait for the masters, and until the memory that FSDP2 gathers from has their values."""
        self._wait_for_masters()
        if not all(segment.is_copied for segment in self._segments):
            self.refresh()
        events, self._events = self._events, []
        for event in events:
            self._device.host_waits(event)

    @override
    def refresh(self) -> None:
        if self.tier is Tier.STREAMED:
            for group in self._gathered:
                group.wait_until_read()
        for segment in self._segments:
            event = segment.copy(self.tier)
            if event is not None:
                self._events.append(event)

    def let_go(self) -> None:
        """Drop all memory after FSDP2 has left the module."""
        for segment in self._segments:
            segment.let_go()
        self.masters, self._gathered = {}, []

    @override
    def set_pending(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait
        for master in self.masters.values():
            if wait is None:
                _show_at_once(master)
            else:
                master._nnx_wait = self._wait_for_masters  # type: ignore[attr-defined]
                _give_class(master, WaitingDTensor)

    def _wait_for_masters(self) -> None:
        wait = self._wait
        if wait is None:
            return
        self.set_pending(None)
        wait()

    def _before_gather(self, group: Gathered) -> None:
        self.settle()
        if not group.is_in_backward:
            self._used(self)
        versions = [segment.version for segment in self._segments]
        # FSDP2 skips the gather of weights that it still holds, although the masters have changed since.
        if group.is_complete and versions != self._gathered_versions:
            group.forget()
        self._gathered_versions = versions

    def _count_gathered(self) -> None:
        if self.tier is Tier.STREAMED:
            self._device.traffic.to_device += sum(segment.gathered_bytes for segment in self._segments)

    def _count_reduced(self, numel: int) -> None:
        if self.tier.steps_on_host:
            self._device.traffic.to_host += numel * self._segments[0].parameters[0].element_size()


def _show_at_once(master: nn.Parameter) -> None:
    if isinstance(master, WaitingDTensor):
        _give_class(master, DTensor)
        del vars(master)["_nnx_wait"]


def _give_class(master: nn.Parameter, cls: type[DTensor]) -> None:
    """Change the class of a master, whether it is guarded or not."""
    # A guard is a subclass of the plain class: end it first, then guard the new class.
    guarded = is_guarded(master)
    show_plain(master)
    master.__class__ = cls  # type: ignore[assignment]
    if guarded:
        show_unsharded(master)
