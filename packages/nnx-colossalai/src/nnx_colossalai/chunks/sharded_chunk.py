"""A chunk above world size 1: one FSDP2 unit, its masters as DTensors.

FSDP2 gathers, frees, reduces and accumulates; a chunk decides from which memory it gathers, and sees to it
that what is gathered is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from nnx.whole import is_guarded, show_plain, show_whole
from nnx_colossalai.chunks._torch_compat import Gathered, WaitingDTensor
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.chunks.sharded_parts import segments_of
from nnx_colossalai.device.device import Device
from nnx_colossalai.plan.spec import Tier

__all__ = ["ShardedChunk"]


class ShardedChunk(Chunk):
    """The parameters of one unit of the plan.

    Args:
        name: As in the plan.
        tier: As in the plan.
        gathered: What FSDP2 gathers for it: one group of parameters, or several where the root's class
            cannot be sharded and its children are instead.
        device: Memory and copies.
        working_dtype: Of the weights that forward and backward compute with; None: the masters' own.
        used: Called with the chunk when a forward uses it.
        ending: Called within every backward.
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
        self._segments = segments_of(gathered, device, working_dtype)
        self._gathered = gathered
        self._gathered_versions: list[int] = []
        self._wait: Callable[[], None] | None = None
        self._events: list[Any] = []
        for group in gathered:
            group.watch(partial(self._before_gather, group), self._count_gathered)
            group.watch_backward(ending, self._count_reduced)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """What the module and the optimizers hold."""
        return {parameter for segment in self._segments for parameter in segment.parameters}

    @property
    def complete_bytes(self) -> int:
        """What the device holds of it, beside this rank's part, while it is computed with."""
        return sum(segment.complete_bytes for segment in self._segments)

    # --- memory -------------------------------------------------------------------------------

    def place(self, tier: Tier) -> dict[nn.Parameter, nn.Parameter]:
        """Put the chunk where the tier says.

        Returns:
            For each parameter that had to be replaced, what took its place.
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
        """Wait for the masters, and for what is gathered to be equal to them."""
        self._wait_for_masters()
        if not all(segment.is_copied for segment in self._segments):
            self.refresh()
        events, self._events = self._events, []
        for event in events:
            self._device.host_waits(event)

    @override
    def refresh(self) -> None:
        for segment in self._segments:
            event = segment.copy(self.tier)
            if event is not None:
                self._events.append(event)

    def let_go(self) -> None:
        """When FSDP2 is off the module: hold no memory."""
        for segment in self._segments:
            segment.let_go()
        self.masters, self._gathered = {}, []

    # --- pending ------------------------------------------------------------------------------

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

    # --- what FSDP2 does ----------------------------------------------------------------------

    def _before_gather(self, group: Gathered) -> None:
        self.settle()
        if not group.is_in_backward:
            self._used(self)
        versions = [segment.version for segment in self._segments]
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
    """Change what a master is, whether it is guarded at the moment or not."""
    guarded = is_guarded(master)
    show_plain(master)
    master.__class__ = cls  # type: ignore[assignment]
    if guarded:
        show_whole(master)
