"""One chunk at world size 1: masters, working weights, and which of them the parameters show.

The user's parameter objects stay; their ``data`` is a view of the masters' buffer between steps and of the
working buffer in a step. Where the masters can compute (on the device, in the same dtype) they are the
working weights, and nothing here ever runs. What must be waited for before a use (a step in the background,
new working weights, weights that lie in host memory) is done by the guard of `chunk`, or by the chunk's own
module a moment earlier, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from nnx_colossalai._torch_compat import without_guards
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.device import Device
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.plan.spec import Tier
from nnx_core.view.pending import guard_pending, unguard_pending

# Parameters one after the other in flat buffers, exactly as large as they are together.
#
# A `Segment` is what a chunk has of one kind: the same dtype between steps, the same dtype in a step, all
# trained or all frozen. Parameters that divide evenly come first, so every one lies at an address that is a
# multiple of as much as its own size is, and no byte is lost to padding.


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
    """Return True if a flat buffer can hold a parameter: it has values, of an ordinary floating dtype.

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


class Shown(Enum):
    """What the parameters of a chunk show; it goes round in this order with each step."""

    MASTERS = auto()
    """Between steps: what the optimizer steps and what everybody else sees."""
    WORKING = auto()
    """In a step: working weights that must be made ready before they are used."""
    READY = auto()
    """In a step: working weights that have the masters' values and are on the device, or on their way."""


class Working(Enum):
    """How the working weights, or what they are fetched from, stand to the masters."""

    STALE = auto()
    """Masters were or may have been changed: they are made anew before they are used."""
    AWAITED = auto()
    """A step in the background makes them anew when it has stepped the masters."""
    WANTED = auto()
    """The same, and it fetches them to the device at once, because the next step has asked for them."""
    FRESH = auto()
    """They have the masters' values."""


class Residence(Enum):
    """Whether the working weights have device memory, and how long."""

    LASTING = auto()
    """As long as the chunk's tier is not `streamed`."""
    FREED = auto()
    """Streamed weights that are in host memory alone."""
    PASSING = auto()
    """Streamed weights on the device, until nobody uses them."""
    HELD = auto()
    """The same until the step is over, because something used them on its own, or may."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """The memory of one segment.

    Attributes:
        master: The tensor that the optimizer steps.
        working: Device memory that forward and backward compute with; None where that is the master.
        source: Host memory that `working` is fetched from, where that is streamed.
        views: The views of `working`, made while it had memory.
        event: The event of the last copy that wrote `working`.
    """

    segment: Segment
    master: Tensor
    working: Tensor | None = None
    source: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    event: Any = None


class LocalChunk(Chunk):
    """Parameters that are placed and fetched together.

    Args:
        name: The name in the plan.
        tier: The tier in the plan.
        segments: The parameters.
        device: Memory and copies.
        on_use: Called when a forward uses the chunk first.

    Attributes:
        slots: The parameters that have working weights of their own.
        users: Forwards and backwards that run with it now.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        segments: list[Segment],
        device: Device[Any],
        on_use: Callable[[LocalChunk], None],
    ) -> None:
        self.index = 0
        self.name, self.tier = name, tier
        self.masters: Mapping[str, nn.Parameter] = {
            name: parameter
            for segment in segments
            for name, parameter in zip(segment.names, segment.parameters, strict=True)
        }
        self.slots: list[Slot] = []
        self.users = 0
        self._segments, self._device, self._on_use = segments, device, on_use
        self._buffers: list[_Buffers] = []
        self._pending: Callable[[], None] | None = None
        self._shown = Shown.MASTERS
        self._working = Working.STALE
        self._residence = Residence.LASTING
        self._lock = Lock()
        self._place(tier)

    @property
    def has_working(self) -> bool:
        """True if a step computes with other tensors than the masters."""
        return bool(self.slots)

    @property
    def is_streamed(self) -> bool:
        """True if its working weights are on the device only while they are used."""
        return self.tier is Tier.STREAMED

    @property
    def is_resident(self) -> bool:
        """True if it is streamed, on the device now, and will be let go; the root's is there all along."""
        return self._residence is Residence.PASSING and self.name != ""

    @property
    def is_settled(self) -> bool:
        """True if its working weights can be used from now until the step is over."""
        return self._shown is Shown.READY and self.tier is not Tier.STREAMED

    @property
    def nbytes(self) -> int:
        """Of the working weights."""
        return sum(segment.numel * segment.working_dtype.itemsize for segment in self._segments)

    @property
    def trained(self) -> list[Slot]:
        """The slots that get gradients."""
        return [slot for slot in self.slots if slot.parameter.requires_grad]

    def move(self, tier: Tier) -> None:
        """Place it otherwise, between two steps.

        Raises:
            DeviceMemoryError: There is no room; it stays where it was.
        """
        before = self.tier
        for buffers in self._buffers:  # first of all, to make room
            buffers.working, buffers.source, buffers.views = None, None, []
        for slot in self.slots:
            slot.working = None
        try:
            self._place(tier)
        except DeviceMemoryError as error:
            failure = error.with_traceback(None)
            failure.__context__ = None  # frames hold what was allocated before it
        else:
            self._move_gradients()
            return
        self._place(before)
        raise failure

    def _place(self, tier: Tier) -> None:
        """Allocate everything, and only then let the parameters have it."""
        on_host = tier.steps_on_host
        before = {id(old.segment): old for old in self._buffers}
        made = []
        for segment in self._segments:
            old = before.get(id(segment))
            if old is not None and self.tier.steps_on_host == on_host:
                buffers = _Buffers(segment, old.master)
            else:
                allocate = self._device.host_empty if on_host else self._device.empty
                buffers = _Buffers(segment, allocate(segment.numel, segment.dtype))
            if on_host or segment.working_dtype != segment.dtype:
                buffers.working = self._device.empty(segment.numel, segment.working_dtype)
                buffers.views = segment.views(buffers.working)
                if tier is Tier.STREAMED:
                    buffers.source = self._device.host_empty(segment.numel, segment.working_dtype)
                    self._device.release(buffers.working)
            made.append(buffers)
        handles = {id(slot.parameter): slot.handles for slot in self.slots}
        self.tier, self._buffers, self.slots = tier, made, []
        for buffers in made:
            self._fill(buffers, handles)
        self._working = Working.STALE
        self._residence = Residence.FREED if tier is Tier.STREAMED else Residence.LASTING

    @torch.no_grad()
    def _fill(self, buffers: _Buffers, handles: Mapping[int, tuple[Any, ...]]) -> None:
        segment = buffers.segment
        views = segment.views(buffers.master)
        working_views: Sequence[Tensor | None] = buffers.views or [None] * len(views)
        for parameter, template, view, working_view in zip(
            segment.parameters, segment.templates, views, working_views, strict=True
        ):
            if parameter.data.data_ptr() != view.data_ptr() or parameter.device != view.device:
                view.copy_(parameter.data)
            parameter.data = view
            if working_view is not None:
                slot = Slot(parameter, template, view, working_view, self.tier.steps_on_host)
                slot.handles = handles.get(id(parameter), ())
                self.slots.append(slot)

    def _move_gradients(self) -> None:
        """Gradients lie where the masters are."""
        for segment in self._segments:
            for parameter, template in zip(segment.parameters, segment.templates, strict=True):
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                numel = template.numel()
                if self.tier.steps_on_host:
                    flat = torch.empty(numel, dtype=gradient.dtype)
                else:
                    flat = self._device.empty(numel, gradient.dtype)
                parameter.grad = view_like(flat, template).copy_(gradient.detach())

    def take_down(self) -> None:
        """Give the parameters memory of their own, and free the chunk's."""
        for segment in self._segments:
            for parameter in segment.parameters:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        self._buffers, self.slots = [], []

    @override
    def refresh(self) -> None:
        if not self.has_working:
            return
        if self._pending is None:
            # At the next use, because the user may change masters until then.
            self._working = Working.STALE
            return
        self._make_new()
        with self._lock:
            before, self._working = self._working, Working.FRESH
        if before is Working.WANTED:
            self._fetch_if_it_fits()

    @override
    def set_pending(self, wait: Callable[[], None] | None) -> None:
        with self._lock:
            self._pending = wait
            self._working = Working.AWAITED
        if wait is None:
            unguard_pending(self.masters.values())
        else:
            guard_pending(self.masters.values(), self._touched)

    def finish(self) -> None:
        """Wait for the optimizer, without having anything be used."""
        unguard_pending(self.masters.values())
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            try:
                self._pending()  # until then a refresh is the background's
            finally:
                self._pending = None

    def _touched(self) -> None:
        """The user looks at a master that is being stepped, and may change it without our noticing."""
        unguard_pending(self.masters.values())
        self._wait()
        self._working = Working.STALE
        self._on_use(self)

    def distrust(self) -> None:
        """Masters may have been changed in ways that leave no trace."""
        if self._pending is None:
            self._working = Working.STALE

    def begin(self) -> None:
        """A step begins: the parameters show working weights, which whoever uses them makes ready first."""
        if self._pending is None and self._working is Working.FRESH and self._is_changed():
            self._working = Working.STALE
        unguard_pending(self.masters.values())
        for slot in self.slots:
            slot.parameter.data = slot.working  # type: ignore[assignment] # slots have working weights
        self._shown = Shown.WORKING
        guard_pending(self.masters.values(), self._used_alone)

    def _is_changed(self) -> bool:
        return any(slot.parameter._version != slot.version for slot in self.slots)

    def _used_alone(self) -> None:
        """Something uses a parameter, and its module is not running."""
        self.make_ready(hold=True)

    def make_ready(self, *, hold: bool = False) -> None:
        """Let computing use the working weights.

        Args:
            hold: True if they stay on the device until the step is over.
        """
        if self._shown is Shown.READY:
            return
        unguard_pending(self.masters.values())
        self._wait()
        if self._working is not Working.FRESH:
            self._make_new()
            self._working = Working.FRESH
        if self._residence is Residence.FREED:
            self._fetch()
        if hold:
            self.hold()
        for buffers in self._buffers:
            if buffers.event is not None:
                self._device.compute_waits(buffers.event)
        self._shown = Shown.READY
        self._on_use(self)

    def hold(self) -> None:
        """Stay on the device until the step is over."""
        if self._residence is Residence.PASSING:
            self._residence = Residence.HELD

    def prepare(self) -> None:
        """Begin what `make_ready` would wait for, if that can be done without waiting."""
        with self._lock:
            if self._pending is not None and self._working is not Working.FRESH:
                self._working = Working.WANTED if self.is_streamed else Working.AWAITED
                return
        if self._working is not Working.FRESH:
            self._make_new()
            self._working = Working.FRESH
        if self._residence is Residence.FREED:
            self._fetch_if_it_fits()

    def _make_new(self) -> None:
        """Let working weights, or what they are fetched from, have the masters' values."""
        # Guarded parameters tell their version, but each takes a call of Python for it.
        with torch.no_grad(), without_guards():
            for buffers in self._buffers:
                self._make_new_buffers(buffers)
            for slot in self.slots:
                slot.version = slot.parameter._version

    def _make_new_buffers(self, buffers: _Buffers) -> None:
        if buffers.working is None:
            return
        if buffers.source is not None:
            if buffers.event is not None:  # the last fetch still reads it, as far as this thread knows
                self._device.host_waits(buffers.event)
            buffers.source.copy_(buffers.master)
            if self._residence is not Residence.FREED:
                buffers.event = self._device.copy(buffers.working, buffers.source)
        elif self.tier.steps_on_host:
            buffers.event = self._device.copy(buffers.working, buffers.master)
        else:
            buffers.working.data.copy_(buffers.master)

    def _fetch(self) -> None:
        fetched: list[_Buffers] = []
        try:
            for buffers in self._buffers:
                if buffers.working is not None and buffers.source is not None:
                    self._device.restore(buffers.working)
                    fetched.append(buffers)
        except DeviceMemoryError:
            for buffers in fetched:
                self._device.release(buffers.working)  # type: ignore[arg-type] # it was restored
            raise
        for buffers in fetched:
            buffers.event = self._device.copy(buffers.working, buffers.source)  # type: ignore[arg-type]
        self._residence = Residence.PASSING

    def _fetch_if_it_fits(self) -> None:
        with suppress(DeviceMemoryError):  # whoever needs it will ask again, and be told
            self._fetch()

    def let_go(self) -> bool:
        """Free the device memory of streamed weights that nobody uses now; whether there was some."""
        if self._residence is not Residence.PASSING or self.users:
            return False
        for buffers in self._buffers:
            if buffers.working is not None:
                self._device.release(buffers.working)
        self._residence = Residence.FREED
        if self._shown is not Shown.MASTERS:
            self._shown = Shown.WORKING
            guard_pending(self.masters.values(), self._used_alone)
        return True

    def end(self) -> None:
        """A step is over: the parameters show the masters, which nothing reads or writes any more."""
        self.users = 0
        if self._residence is Residence.HELD:
            self._residence = Residence.PASSING
        unguard_pending(self.masters.values())
        if self._shown is Shown.READY:
            self._keep_changes()
        for slot in self.slots:
            slot.parameter.data = slot.master
            slot.accumulator = None
        self._shown = Shown.MASTERS
        if self._pending is not None:  # not used in this step, and the optimizer is still at it
            guard_pending(self.masters.values(), self._touched)
            return
        self.let_go()
        for buffers in self._buffers:
            if buffers.event is not None:
                self._device.host_waits(buffers.event)
                buffers.event = None

    def _keep_changes(self) -> None:
        """Working weights that the user has changed in place are the masters' new values."""
        changed = [slot for slot in self.slots if slot.parameter._version != slot.version]
        if changed:
            self._working = Working.STALE
            with torch.no_grad():
                for slot in changed:
                    slot.master.copy_(slot.working)  # type: ignore[arg-type] # slots have working weights
