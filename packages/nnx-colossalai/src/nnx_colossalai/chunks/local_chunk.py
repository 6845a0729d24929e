"""Hold one chunk at world size 1: its masters, its working weights, and the switch between them.

The user's parameter objects stay. Their ``data`` is a view of the masters' buffer between steps and of the
working buffer in a step. Masters on the device in the working dtype are the working weights themselves: no
switch is necessary. Otherwise the first use waits for a background step, for refreshed weights or for a fetch
from host memory. The hook of the chunk's module starts this; a guard starts it for other uses.
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

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WIDEST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Parameters of one kind, packed into flat buffers without padding.

    One kind has one dtype between steps and one dtype in a step, and is all trained or all frozen. Parameters
    whose size has the largest power of two as a factor come first, so that each one is aligned.

    Attributes:
        dtype: The dtype between steps.
        working_dtype: The dtype in a step.
        names: The full names of the parameters.
        parameters: The user's parameter objects.
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
        """Return a view of a flat buffer for each parameter."""
        return [
            view_like(buffer, template, offset)
            for template, offset in zip(self.templates, self.offsets, strict=True)
        ]


def is_chunkable(parameter: nn.Parameter) -> bool:
    """Return True if a flat buffer can hold a parameter: it is not lazy and has an ordinary floating dtype.

    Example:
        >>> is_chunkable(nn.Parameter(torch.zeros(2))), is_chunkable(nn.Parameter(torch.zeros(2).cfloat()))
        (True, False)
    """
    return parameter.dtype in _DTYPES and not nn.parameter.is_lazy(parameter)


def segments_of(
    parameters: Mapping[str, nn.Parameter], working_dtype: Callable[[nn.Parameter], torch.dtype]
) -> list[Segment]:
    """Pack parameters into segments, in the order in which their kinds first occur.

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
    """Return the largest power of two that divides a number, up to the widest useful alignment."""
    return min(numel & -numel, _WIDEST) if numel else _WIDEST


def _template(parameter: nn.Parameter) -> Tensor:
    """Return a meta tensor with a dense layout that keeps memory formats such as channels last."""
    with torch.no_grad():
        return torch.empty_like(parameter.detach(), device="meta", memory_format=torch.preserve_format)


def view_like(buffer: Tensor, template: Tensor, offset: int = 0) -> Tensor:
    """Return a view of a flat buffer from `offset` on, with the shape and strides of `template`."""
    with torch.no_grad(), torch.inference_mode(False):
        return buffer.as_strided(template.shape, template.stride(), buffer.storage_offset() + offset)


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of a chunk.

    Attributes:
        parameter: The user's parameter object.
        template: A meta tensor with its shape and strides.
        master: The master, which is its data between steps.
        working: The working weight, which is its data in a step; None if the master is the working weight.
        on_host: True if the master is in host memory.
        total: The sum of its gradients while a backward runs, in the master's dtype and memory.
        memory: Host memory of the last total, for the next one unless the user holds the last gradient.
        version: The version counter of the parameter when the working weights were refreshed.
        accumulator: The autograd node of its gradient in this step; None until `_Window` asks for it.
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
    """The shape and strides of the template, kept because a tensor takes longer to return them."""

    def __post_init__(self) -> None:
        self.numel, self.dtype = self.template.numel(), self.master.dtype
        self.geometry = (self.template.shape, self.template.stride())


class Shown(Enum):
    """The tensors that the parameters of a chunk show; each step runs through this order."""

    MASTERS = auto()
    """Between steps: masters, which the optimizer steps and users see."""
    WORKING = auto()
    """In a step: working weights that must be made ready before they are used."""
    READY = auto()
    """In a step: working weights with the masters' values, on the device or being copied to it."""


class Working(Enum):
    """The state of the working weights, or of their host copy, relative to the masters."""

    STALE = auto()
    """Masters were or may have been changed: the next use refreshes the weights."""
    AWAITED = auto()
    """A background step refreshes the weights after it has stepped the masters."""
    WANTED = auto()
    """As AWAITED, and the background step also fetches the weights, because the next forward needs them."""
    FRESH = auto()
    """The weights have the masters' values."""


class Residence(Enum):
    """The device memory of the working weights."""

    LASTING = auto()
    """Weights of a chunk that is not streamed; their memory stays."""
    FREED = auto()
    """Streamed weights without device memory."""
    PASSING = auto()
    """Streamed weights on the device until their last user has finished."""
    HELD = auto()
    """Streamed weights on the device until the step ends: a use outside of the module happened, or may."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """The memory of one segment.

    Attributes:
        master: The tensor that the optimizer steps.
        working: Device memory of the working weights; None if the master is the working weight.
        source: Host memory that `working` is fetched from, if it is streamed.
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
    """One chunk at world size 1: parameters that are placed and fetched together.

    Args:
        name: The name in the plan.
        tier: The tier in the plan.
        segments: The parameters.
        device: The device that allocates and copies.
        on_use: A function that is called when the chunk becomes ready for a use.

    Attributes:
        slots: The parameters that have working weights of their own.
        users: The number of forwards and backwards that use it now.
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
        """True if its working weights are on the device only during uses."""
        return self.tier is Tier.STREAMED

    @property
    def is_resident(self) -> bool:
        """True if it is streamed and on the device until its last use; never for the root, which stays."""
        return self._residence is Residence.PASSING and self.name != ""

    @property
    def is_settled(self) -> bool:
        """True if its working weights stay ready until the step ends."""
        return self._shown is Shown.READY and self.tier is not Tier.STREAMED

    @property
    def nbytes(self) -> int:
        """The bytes of the working weights."""
        return sum(segment.numel * segment.working_dtype.itemsize for segment in self._segments)

    @property
    def trained(self) -> list[Slot]:
        """The slots that get gradients."""
        return [slot for slot in self.slots if slot.parameter.requires_grad]

    def move(self, tier: Tier) -> None:
        """Move the chunk to another tier, between two steps.

        Raises:
            DeviceMemoryError: There is no room; the chunk keeps its tier.
        """
        before = self.tier
        # Freed first, because old and new working weights may not fit together.
        for buffers in self._buffers:
            buffers.working, buffers.source, buffers.views = None, None, []
        for slot in self.slots:
            slot.working = None
        try:
            self._place(tier)
        except DeviceMemoryError as error:
            # The frames of the traceback hold buffers that were allocated before the error.
            failure = error.with_traceback(None)
            failure.__context__ = None
        else:
            self._move_gradients()
            return
        self._place(before)
        raise failure

    def _place(self, tier: Tier) -> None:
        """Allocate the buffers of a tier and fill them; the old ones stay in place if there is no room."""
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
                    # The views above need memory when they are made, and keep their shapes without it.
                    self._device.release(buffers.working)
            made.append(buffers)
        # Nothing below allocates on the device: an error above has changed no parameter.
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
            # Equal only where the chunk keeps its master buffer in the new tier.
            if parameter.data.data_ptr() != view.data_ptr() or parameter.device != view.device:
                view.copy_(parameter.data)
            parameter.data = view
            if working_view is not None:
                slot = Slot(parameter, template, view, working_view, self.tier.steps_on_host)
                slot.handles = handles.get(id(parameter), ())
                self.slots.append(slot)

    def _move_gradients(self) -> None:
        """Move the gradients to the memory of the masters."""
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
        """Copy the parameters to memory of their own, and free the chunk's memory."""
        for segment in self._segments:
            for parameter in segment.parameters:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        self._buffers, self.slots = [], []

    @override
    def refresh(self) -> None:
        if not self.has_working:
            return
        if self._pending is None:
            # Refreshed at the next use, because the user may change masters until then.
            self._working = Working.STALE
            return
        # The background thread calls while the chunk is pending; uses on the main thread wait for its ticket.
        self._refresh_working()
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
        """Wait for the background step, without counting a use of the chunk."""
        unguard_pending(self.masters.values())
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            try:
                self._pending()
            finally:
                # Not earlier: until the ticket is finished, `refresh` must see that the background calls it.
                self._pending = None

    def _touched(self) -> None:
        """Wait for a pending step, because the user accesses a master between steps."""
        unguard_pending(self.masters.values())
        self._wait()
        # The user now has the plain tensor, and may change it without a new version.
        self._working = Working.STALE
        self._on_use(self)

    def distrust(self) -> None:
        """Refresh the weights before the next use, because masters may have changed without a new version."""
        # A pending chunk was not accessed since its step, or `_touched` would have ended the wait.
        if self._pending is None:
            self._working = Working.STALE

    def begin(self) -> None:
        """Begin a step: show working weights, behind a guard that makes them ready at the first use."""
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
        """Make the weights ready for a use outside of the chunk's modules."""
        # No hook tells when such a use ends.
        self.make_ready(hold=True)

    def make_ready(self, *, hold: bool = False) -> None:
        """Make the working weights ready for compute.

        Args:
            hold: True if they stay on the device until the step ends.
        """
        if self._shown is Shown.READY:
            return
        unguard_pending(self.masters.values())
        self._wait()
        if self._working is not Working.FRESH:
            self._refresh_working()
            self._working = Working.FRESH
        if self._residence is Residence.FREED:
            self._fetch()
        if hold:
            self.hold()
        # The compute stream waits for the copies, so this thread can already launch kernels behind them.
        for buffers in self._buffers:
            if buffers.event is not None:
                self._device.compute_waits(buffers.event)
        self._shown = Shown.READY
        self._on_use(self)

    def hold(self) -> None:
        """Keep the weights on the device until the step ends."""
        if self._residence is Residence.PASSING:
            self._residence = Residence.HELD

    def prepare(self) -> None:
        """Begin the refresh and the fetch that `make_ready` would wait for, if neither has to wait."""
        # Under the lock: either the background sees WANTED and fetches, or this thread sees FRESH and does.
        with self._lock:
            if self._pending is not None and self._working is not Working.FRESH:
                self._working = Working.WANTED if self.is_streamed else Working.AWAITED
                return
        if self._working is not Working.FRESH:
            self._refresh_working()
            self._working = Working.FRESH
        if self._residence is Residence.FREED:
            self._fetch_if_it_fits()

    def _refresh_working(self) -> None:
        """Copy the masters' values to the working weights, or to the host memory they are fetched from."""
        # Without guards, because a guarded parameter returns its version through a slower Python call.
        with torch.no_grad(), without_guards():
            for buffers in self._buffers:
                self._refresh_buffers(buffers)
            for slot in self.slots:
                slot.version = slot.parameter._version

    def _refresh_buffers(self, buffers: _Buffers) -> None:
        if buffers.working is None:
            return
        if buffers.source is not None:
            # The last fetch may still read the source.
            if buffers.event is not None:
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
            # All segments or none, because `_residence` describes the chunk.
            for buffers in fetched:
                self._device.release(buffers.working)  # type: ignore[arg-type] # it was restored
            raise
        for buffers in fetched:
            buffers.event = self._device.copy(buffers.working, buffers.source)  # type: ignore[arg-type]
        self._residence = Residence.PASSING

    def _fetch_if_it_fits(self) -> None:
        # This fetch is ahead of its use; the use itself fetches again, and raises if there is still no room.
        with suppress(DeviceMemoryError):
            self._fetch()

    def let_go(self) -> bool:
        """Free the device memory of streamed weights without users; return True if it was freed."""
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
        """End a step: show the masters, after all copies from them are complete."""
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
        # The step did not use the chunk, so the background may still step it.
        if self._pending is not None:
            guard_pending(self.masters.values(), self._touched)
            return
        self.let_go()
        # The optimizer changes the masters or their host copy next: no copy may still read them.
        for buffers in self._buffers:
            if buffers.event is not None:
                self._device.host_waits(buffers.event)
                buffers.event = None

    def _keep_changes(self) -> None:
        """Copy working weights that the user changed in place to the masters."""
        changed = [slot for slot in self.slots if slot.parameter._version != slot.version]
        if changed:
            self._working = Working.STALE
            with torch.no_grad():
                for slot in changed:
                    slot.master.copy_(slot.working)  # type: ignore[arg-type] # slots have working weights
