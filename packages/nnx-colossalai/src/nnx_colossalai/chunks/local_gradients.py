"""How gradients get from a backward with working weights to the masters, at world size 1.

Autograd accumulates into ``param.grad`` at the working dtype. Before it does, what is there already is put
aside, so that nothing is ever added up in 16 bits. After it has, the gradient is taken: on the device it is
converted, small ones a few at a time; for masters in host memory it travels at its own dtype on the copy lane
and is converted there when it has arrived. At the end of the backward the masters get their gradients.

This file owns staging memory, and the hooks by which a step hears of gradients; it never decides when a
backward has ended.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nnx_colossalai._torch_compat import Silenced, has_memory_alone, make_last, without_guards
from nnx_colossalai.chunks.local_chunk import LocalChunk, Slot, view_like
from nnx_colossalai.device import Device
from nnx_core._torch_compat import foreach_copy_

_BATCH = 1 << 20
"""Elements that wait to be converted together: Python between two kernels costs more than its own time."""

_LARGE = 1 << 14
"""Elements from which a total has memory of its own."""


@dataclass(slots=True, eq=False)
class _Arriving:
    """A gradient on its way to host memory.

    Attributes:
        staging: The memory in which it arrives; None if it arrives where it stays.
    """

    slot: Slot
    target: Tensor
    staging: Tensor | None
    event: Any
    nbytes: int


class Gradients:
    """Takes gradients at the working dtype and keeps totals for the masters.

    Args:
        device: Memory and copies.
    """

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self.limit = 0
        """Bytes that may be on their way before somebody waits."""
        self._arriving: deque[_Arriving] = deque()
        self._bytes_arriving = 0
        self._staging: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._unconverted: dict[Slot, Tensor] = {}
        self._elements_unconverted = 0

    def put_aside(self, slot: Slot) -> None:
        """Before autograd accumulates: what is in ``grad`` is a part of the total."""
        parameter = slot.parameter
        kept = parameter.grad
        if kept is not None:
            if slot in self._unconverted:
                self._convert()
            parameter.grad = None
            if kept.dtype != slot.master.dtype:  # the user's, or of a backward that failed
                kept = kept.to(slot.master.dtype)
            slot.total = kept if slot.total is None else self._sum(slot, slot.total, kept)

    def take(self, slot: Slot) -> None:
        """After autograd has accumulated: take the gradient, and free it as soon as it is where it goes."""
        self.take_all((slot,))

    def take_all(self, slots: Iterable[Slot]) -> None:
        """The same for several."""
        with torch.set_grad_enabled(False) if torch.is_grad_enabled() else nullcontext():
            for slot in slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    slot.parameter.grad = None
                    self._take(slot, gradient)

    def _take(self, slot: Slot, gradient: Tensor) -> None:
        if slot in self._unconverted:
            self._convert()
        if gradient.layout is not torch.strided or gradient.requires_grad:
            self._take_unusual(slot, gradient)
        elif slot.on_host:
            self._send(slot, gradient)
        elif slot.total is None:
            self._unconverted[slot] = gradient
            self._elements_unconverted += slot.numel
            if self._elements_unconverted >= _BATCH:
                self._convert()
        else:
            slot.total = self._sum(slot, slot.total, gradient)

    def _convert(self) -> None:
        """Make totals of the gradients that wait for it."""
        waiting = self._unconverted
        self._unconverted, self._elements_unconverted = {}, 0
        with torch.no_grad():
            totals = self._new_together(list(waiting))
            foreach_copy_(totals, list(waiting.values()))
        for slot, total in zip(waiting, totals, strict=True):
            slot.total = total

    def _new_together(self, slots: list[Slot]) -> list[Tensor]:
        """Memory for totals on the device; small ones lie one after the other.

        Each large one has its own: what is freed in few large pieces goes back to the system, and coming by
        it again in every step takes longer than the conversion.
        """
        small: dict[torch.dtype, int] = {}
        offsets = {}
        large: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for slot in slots:
            if slot.numel < _LARGE:
                offsets[slot] = small.get(slot.dtype, 0)
                small[slot.dtype] = offsets[slot] + slot.numel
            else:
                large[slot.dtype].append(slot.numel)
        shared = {dtype: self._device.empty(numel, dtype) for dtype, numel in small.items()}
        own = {dtype: iter(self._device.empty_each(numels, dtype)) for dtype, numels in large.items()}
        return [
            shared[slot.dtype].as_strided(*slot.geometry, offsets[slot])
            if slot in offsets
            else next(own[slot.dtype]).as_strided(*slot.geometry)
            for slot in slots
        ]

    def _take_unusual(self, slot: Slot, gradient: Tensor) -> None:
        """One that is sparse, or itself to be differentiated: without staging."""
        self._drain()
        with torch.enable_grad():
            moved = gradient.to(slot.master.device, slot.master.dtype)
            slot.total = moved if slot.total is None else slot.total + moved

    def _sum(self, slot: Slot, total: Tensor, gradient: Tensor) -> Tensor:
        if total.layout is not torch.strided or total.requires_grad or gradient.requires_grad:
            return total + gradient.to(total.device, total.dtype)
        # Converted first, then added: adding across dtypes in place is several times slower.
        return total.add_(gradient.to(total.device, total.dtype))

    def _new(self, slot: Slot) -> Tensor:
        if slot.on_host:
            return _on_host(slot, lambda numel, dtype: torch.empty(numel, dtype=dtype))
        return self._device.empty(slot.numel, slot.dtype).as_strided(*slot.geometry)

    def _send(self, slot: Slot, gradient: Tensor) -> None:
        numel, dtype = gradient.numel(), gradient.dtype
        nbytes = numel * gradient.element_size()
        while self._arriving and self._bytes_arriving + nbytes > self.limit:
            self._receive()
        if dtype == slot.master.dtype and slot.total is None:
            slot.total = target = _on_host(slot, self._device.host_empty)
            staging = None
        else:
            free = self._staging[numel, dtype]
            staging = free.pop() if free else self._device.host_empty(numel, dtype)
            target = view_like(staging, slot.template)
        event = self._device.copy(target, gradient)
        self._arriving.append(_Arriving(slot, target, staging, event, nbytes))
        self._bytes_arriving += nbytes

    def _receive(self) -> None:
        """Wait for the oldest gradient on its way, and add it to its total."""
        arriving = self._arriving.popleft()
        self._bytes_arriving -= arriving.nbytes
        self._device.host_waits(arriving.event)
        if arriving.staging is None:
            return
        slot = arriving.slot
        with torch.no_grad():
            if slot.total is None:
                slot.total = self._new(slot)
                slot.total.copy_(arriving.target)
            else:
                slot.total = self._sum(slot, slot.total, arriving.target)
        self._staging[arriving.staging.numel(), arriving.staging.dtype].append(arriving.staging)

    def _drain(self) -> None:
        while self._arriving:
            self._receive()

    def finish(self) -> None:
        """Wait for all that is on its way: totals are complete then."""
        if self._unconverted:
            self._convert()
        self._drain()

    def forget_staging(self) -> None:
        """Free what the next backward would use again."""
        self._drain()
        self._staging.clear()

    def give(self, slot: Slot) -> None:
        """Let the parameter, whose data is the master by now, have its total as its gradient."""
        parameter, master = slot.parameter, slot.master
        given = parameter.grad  # by the user, to the working weights, unless it was there before the step
        if given is not None and (given.dtype != master.dtype or given.device != master.device):
            given = given.to(master.device, master.dtype)
            parameter.grad = None
            slot.total = given if slot.total is None else self._sum(slot, slot.total, given)
        elif given is not None and slot.total is not None:
            slot.total = self._sum(slot, slot.total, given)
        if slot.total is not None:
            parameter.grad, slot.total = slot.total, None

    def put_back(self, slot: Slot) -> None:
        """Let the parameter have its total beside its working weights, where it may be set to None."""
        if slot.total is not None:
            with without_guards():
                slot.parameter.data = slot.master
                self.give(slot)
                slot.parameter.data = slot.working  # type: ignore[assignment] # it has taken gradients of them


def _on_host(slot: Slot, allocate: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    """Memory for a total: that of the last one, as making host memory known to a driver takes long.

    Args:
        slot: The parameter.
        allocate: Allocates flat memory where there is none, or somebody still holds the last gradient.
    """
    if slot.memory is None or not has_memory_alone(slot.memory):
        slot.memory = allocate(slot.numel, slot.dtype)
    # Of a tensor of its own: what the user does to one gradient is not recorded for the next.
    return slot.memory.detach().as_strided(*slot.geometry)


# How a step hears of gradients: of each by itself, or of a chunk's small ones with the last of them.
#
# A call of Python between two kernels finds nothing of its own in the caches, and costs about as much as a
# small kernel. So a chunk whose masters lie on the device learns which of its small parameters gets its
# gradient last. From the next backward on the hooks of its others are off while the backward runs; what has
# arrived is converted when the last one comes, or at the end where the order was another one. Every parameter
# has its hook when a backward begins, and whatever is called first takes the others off: no backward goes
# unnoticed.
#
# Two gradients of one parameter in one backward must not be added up at the working dtype. Where backwards
# run inside of each other, or a forward inside of a backward, which may begin one, every parameter keeps its
# hook for good. One case escapes: a backward inside of another one that runs no forward, was not there when
# the order was learned, and reaches a small parameter twice.


_SMALL = 1 << 20
"""Elements up to which a gradient may wait at its working dtype for others; larger ones are worth a call."""


class Listener:
    """Hooks on the parameters of chunks.

    Args:
        gradients: The gradients' destination.
        is_active: True if a step is under way.
        notice: Called in one when a gradient is about to arrive, or has.
        arrived: Called with what was heard of, when it has been taken.
    """

    def __init__(
        self,
        gradients: Gradients,
        is_active: Callable[[], bool],
        notice: Callable[[], None],
        arrived: Callable[[LocalChunk, Slot], None],
    ) -> None:
        self._gradients, self._is_active = gradients, is_active
        self._notice, self._arrived = notice, arrived
        self._last: dict[LocalChunk, Slot] = {}
        self._heard: set[Slot] = set()
        self._together: dict[LocalChunk, list[Slot]] = {}
        self._silenced = Silenced(())
        self._may_group = True

    def listen(self, chunk: LocalChunk) -> None:
        """Take the gradients of parameters that are trained, after whoever else looks at them."""
        for slot in chunk.slots:
            parameter = slot.parameter
            if slot.handles:
                make_last(slot.handles[0])
            elif parameter.requires_grad:
                after = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, chunk=chunk, slot=slot: self._after(chunk, slot)
                )
                slot.handles = (after,)
            if parameter.grad is not None:
                self.listen_before(slot)

    def listen_before(self, slot: Slot) -> None:
        """Where a gradient is there already: put it aside before another comes."""
        parameter = slot.parameter
        if len(slot.handles) == 1 and parameter.requires_grad and parameter.grad is not None:
            before = parameter.register_hook(lambda _: self._before(slot))  # type: ignore[no-untyped-call]
            slot.handles = (*slot.handles, before)

    def stop(self, chunks: Iterable[LocalChunk]) -> None:
        """Remove all hooks, and hold on to nothing of the chunks."""
        self.end_backward()
        for chunk in chunks:
            for slot in chunk.slots:
                for handle in slot.handles:
                    handle.remove()
                slot.handles = ()
        self._last.clear()
        self._heard.clear()

    def _before(self, slot: Slot) -> None:
        if self._is_active():
            self._notice()
            self._gradients.put_aside(slot)

    def _after(self, chunk: LocalChunk, slot: Slot) -> None:
        if not self._is_active():
            return
        if chunk in self._together and self._last[chunk] is slot:
            self._gradients.take_all(self._together[chunk])
        # Before the hooks of others are taken off, and gradients that are there are put aside.
        self._gradients.take(slot)
        self._notice()
        if chunk not in self._together:
            self._learn(chunk, slot)
        self._arrived(chunk, slot)

    def _learn(self, chunk: LocalChunk, slot: Slot) -> None:
        if slot in self._heard:
            self.stay_apart()
            return
        self._heard.add(slot)
        if self._may_group and _may_wait(slot):
            self._last[chunk] = slot

    def begin_backward(self) -> None:
        """Take the hooks off parameters whose gradients another one's will tell of."""
        self.end_backward()  # of one that failed
        self._heard.clear()
        if not self._may_group or torch.is_grad_enabled():
            return
        for chunk, last in self._last.items():
            if last.parameter.requires_grad:
                self._together[chunk] = [
                    slot
                    for slot in chunk.slots
                    if slot is not last and slot.handles and slot.parameter.requires_grad and _may_wait(slot)
                ]
        waiting = [slot for together in self._together.values() for slot in together]
        for slot in waiting:
            if slot.parameter.grad is not None:
                self._gradients.put_aside(slot)
        self._silenced = Silenced(handle for slot in waiting for handle in slot.handles)

    def end_backward(self) -> bool:
        """Put them back, and take what has come after the last one; whether there was any."""
        self._silenced.end()
        together, self._together = self._together, {}
        is_late = False
        for chunk, slots in together.items():
            late = [slot for slot in slots if slot.parameter.grad is not None]
            if late:
                self._gradients.take_all(late)
                is_late = True
                del self._last[chunk]  # the next backward shows which one is the last now
        return is_late

    def stay_apart(self) -> None:
        """Hear of every gradient from now on."""
        self._may_group = False
        self.end_backward()
        self._last.clear()


def _may_wait(slot: Slot) -> bool:
    return not slot.on_host and slot.numel <= _SMALL
