"""How gradients get from a backward with working weights to the masters, at world size 1.

Autograd accumulates into ``param.grad`` at the working dtype. Before it does, what is there already is put
aside, so that nothing is ever added up in 16 bits. After it has, the gradient is taken: on the device it is
converted, small ones a few at a time; for masters in host memory it travels at its own dtype on the copy lane
and is converted there when it has arrived. At the end of the backward the masters get their gradients.

This file owns staging memory; it never decides when a backward has ended.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nnx_colossalai._torch_compat import has_memory_alone
from nnx_colossalai.device.device import Device

_BATCH = 1 << 20
"""Elements that wait to be converted together: Python between two kernels costs more than its own time."""

_LARGE = 1 << 14
"""Elements from which a total has memory of its own."""


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of a chunk.

    Attributes:
        parameter: The user's object.
        template: Its shape and order of elements, on the meta device.
        master: Its values between steps.
        working: The weights that it computes with in a step; None where that is the master itself.
        on_host: True if the master lies in host memory.
        total: Its complete gradient while a backward runs, in the master's dtype and memory.
        memory: Host memory that its last total was in, and the next one will be in, if nobody holds the last.
        version: The version of the parameter when the working weights were shown.
        accumulator: The autograd node of its gradient in this step, where somebody has asked for it.
        handles: The handles of our hooks.
    """

    parameter: nn.Parameter
    template: Tensor
    master: Tensor
    working: Tensor | None
    on_host: bool
    total: Tensor | None = None
    memory: Tensor | None = None
    version: int = 0
    accumulator: Any = None
    handles: tuple[Any, ...] = ()
    numel: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    geometry: tuple[torch.Size, tuple[int, ...]] = field(init=False)
    """Shape and strides of the template; tensors take longer to tell these, and the master's dtype."""

    def __post_init__(self) -> None:
        self.numel, self.dtype = self.template.numel(), self.master.dtype
        self.geometry = (self.template.shape, self.template.stride())


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
            torch._foreach_copy_(totals, list(waiting.values()))
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

    # --- to host memory -----------------------------------------------------------------------

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

    # --- end ----------------------------------------------------------------------------------

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
            with torch._C.DisableTorchFunctionSubclass():
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


# --- flat ------------------------------------------------------------------------------------------------
#
# Parameters one after the other in flat buffers, exactly as large as they are together.
#
# A `Segment` is what a chunk has of one kind: the same dtype between steps, the same dtype in a step, all
# trained or all frozen. Parameters that divide evenly come first, so every one lies at an address that is a
# multiple of as much as its own size is, and no byte is lost to padding. This file knows layouts and views;
# it allocates and copies nothing.


_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WIDEST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Parameters of one kind, as they follow each other in each flat buffer.

    Attributes:
        dtype: Between steps.
        working_dtype: The dtype in a step.
        names: Full names.
        parameters: The user's objects.
        offsets: The offset of each parameter's first element.
        numel: The number of all elements.
        templates: Meta tensors with the shape and strides of each.
    """

    dtype: torch.dtype
    working_dtype: torch.dtype
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    numel: int
    templates: tuple[Tensor, ...]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer."""
        return [
            view_like(buffer, template, offset)
            for template, offset in zip(self.templates, self.offsets, strict=True)
        ]


def is_chunkable(parameter: nn.Parameter) -> bool:
    """Whether a parameter can lie in a flat buffer: it has values, of an ordinary floating dtype.

    Example:
        >>> is_chunkable(nn.Parameter(torch.zeros(2))), is_chunkable(nn.Parameter(torch.zeros(2).cfloat()))
        (True, False)
    """
    return parameter.dtype in _DTYPES and not nn.parameter.is_lazy(parameter)


def segments_of(
    parameters: Mapping[str, nn.Parameter], working_dtype: Callable[[nn.Parameter], torch.dtype]
) -> list[Segment]:
    """Lay parameters out, kind by kind, in the order in which kinds first occur.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> [segment] = segments_of(dict(layer.named_parameters()), lambda _: torch.bfloat16)
        >>> segment.names, segment.offsets, segment.numel
        (('weight', 'bias'), (0, 6), 8)
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        kind = (parameter.dtype, working_dtype(parameter), parameter.requires_grad)
        kinds.setdefault(kind, []).append((name, parameter))
    return [_segment(dtype, working, members) for (dtype, working, _), members in kinds.items()]


def _segment(
    dtype: torch.dtype, working: torch.dtype, members: Iterable[tuple[str, nn.Parameter]]
) -> Segment:
    ordered = sorted(members, key=lambda member: -_evenness(member[1].numel()))
    offsets, end = [], 0
    for _, parameter in ordered:
        offsets.append(end)
        end += parameter.numel()
    return Segment(
        dtype=dtype,
        working_dtype=working,
        names=tuple(name for name, _ in ordered),
        parameters=tuple(parameter for _, parameter in ordered),
        offsets=tuple(offsets),
        numel=end,
        templates=tuple(_template(parameter) for _, parameter in ordered),
    )


def _evenness(numel: int) -> int:
    """The largest power of two that divides a number, up to what alignment can gain from."""
    return min(numel & -numel, _WIDEST) if numel else _WIDEST


def _template(parameter: nn.Parameter) -> Tensor:
    """Keeps an order of elements such as channels last, and makes a view with gaps dense."""
    with torch.no_grad():
        return torch.empty_like(parameter.detach(), device="meta", memory_format=torch.preserve_format)


def view_like(buffer: Tensor, template: Tensor, offset: int = 0) -> Tensor:
    """Elements of a flat buffer from `offset` on, in the shape and order of `template`."""
    with torch.no_grad(), torch.inference_mode(False):
        return buffer.as_strided(template.shape, template.stride(), buffer.storage_offset() + offset)
