"""How a step hears of gradients: of each by itself, or of a chunk's small ones with the last of them.

A call of Python between two kernels finds nothing of its own in the caches, and costs about as much as a
small kernel. So a chunk whose masters lie on the device learns which of its small parameters gets its
gradient last. From the next backward on the hooks of its others are off while the backward runs; what has
arrived is converted when the last one comes, or at the end where the order was another one. Every parameter
has its hook when a backward begins, and whatever is called first takes the others off: no backward goes
unnoticed.

Two gradients of one parameter in one backward must not be added up at the working dtype. Where backwards run
inside of each other, or a forward inside of a backward, which may begin one, every parameter keeps its hook
for good. One case escapes: a backward inside of another one that runs no forward, was not there when the
order was learned, and reaches a small parameter twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from nnx_colossalai._torch_compat import Silenced, make_last
from nnx_colossalai.chunks.local_chunk import LocalChunk
from nnx_colossalai.chunks.local_gradients import Gradients, Slot

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

    # --- hooks --------------------------------------------------------------------------------

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

    # --- together -----------------------------------------------------------------------------

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
