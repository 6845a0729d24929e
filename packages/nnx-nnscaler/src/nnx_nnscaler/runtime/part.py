"""What is known of a tensor that this rank stores in part: where the parts are, the whole while it is used.

It owns gathering, keeping and writing back the whole of a parameter or a gradient, and how gradients are
shown: `parameter.grad` is a stand-in that answers as the whole gradient would, and gathers it only when a
value is asked for; in local mode it is the gradient of the local part. Who gets to see the whole is
`nnx_core.whole`'s business, where parts are stored `storage`'s, ZeRO's rows `zero`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from typing_extensions import override

from nnx_core import whole as guards
from nnx_core.errors import UnsupportedError
from nnx_core.used import CollectiveOrder
from nnx_core.watch import refuse_unequal_gradient
from nnx_core.whole import Guard, Seen, Source, guarded_mode, local_mode
from nnx_nnscaler.runtime.collectives import Conversions
from nnx_nnscaler.runtime.layout import ParameterLayout


class UnitPart(Protocol):
    """Where a rank finds its part, within the unit, of one parameter. Used in local mode only."""

    @property
    def is_gathered(self) -> bool:
        """Whether `value` takes a collective of its own. That for rows of parameters is the bucket's."""

    def value(self) -> Tensor:
        """It, without gradient."""

    def differentiable(self) -> Tensor:
        """It, so that gradients reach the parameter."""

    def write(self, value: Tensor) -> None:
        """Take over other values, which every rank of the axis passes alike."""

    def replace(self, value: Tensor) -> None:
        """Take over values that may be of another dtype or on another device."""


class LocalPart:
    """A part that this rank stores completely."""

    is_gathered = False

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def value(self) -> Tensor:  # noqa: D102 # as the protocol says
        return self._tensor.detach()

    def differentiable(self) -> Tensor:  # noqa: D102
        return self._tensor

    def write(self, value: Tensor) -> None:  # noqa: D102
        if value.data_ptr() != self._tensor.data_ptr():
            with torch.no_grad():
                self._tensor.copy_(value)

    def replace(self, value: Tensor) -> None:  # noqa: D102
        self._tensor.data = value.contiguous()


class Summand:
    """A tensor whose sum over the ranks of the unit is what counts."""

    def __init__(self, tensor: Tensor, unit: Conversions) -> None:
        self._tensor = tensor
        self._unit = unit

    @property
    def is_gathered(self) -> bool:  # noqa: D102
        return True

    def value(self) -> Tensor:  # noqa: D102
        return self._unit.communicator.all_reduce(self._tensor.detach())

    def differentiable(self) -> Tensor:  # noqa: D102
        return self._unit.all_reduce__keep(self._tensor)

    def write(self, value: Tensor) -> None:  # noqa: D102
        with torch.no_grad():
            self._tensor.copy_(value / self._unit.size)

    def replace(self, value: Tensor) -> None:  # noqa: D102
        self._tensor.data = value / self._unit.size


class GradientParts(Protocol):
    """What the gradients of one guarded parameter are parts of. Used in local mode only."""

    def are_whole(self) -> bool:
        """Whether this rank stores all of the gradient it has now."""

    def source_of(self, gradient: Tensor) -> UnitPart:
        """Where the part within the unit of a gradient comes from."""

    def assigned(self) -> None:
        """Somebody gave the parameter another gradient."""


class Part(guards.Part):
    """What is known of one guarded tensor, and its whole while someone uses it.

    Args:
        tensor: The part that this rank stores: of a parameter, or of the gradient of one.
        layout: Says which part it is.
        unit: Collectives of the plan unit.
        source: The source of its part within the unit.
        synchronized: True if the reducer sums its gradients over the unit.
        in_use: The list in which it puts itself while it keeps the whole.
        name: The name used in errors.
        order: Notices a whole that only some ranks ask for.

    Attributes:
        gradients: The whole that a parameter's gradients are parts of; None where they are whole.
        shown: The tensor that the last one to look at the gradient was given.
    """

    gradients: GradientParts | None = None
    shown: Any = None
    _source_of_data: Source | None = None

    def __init__(
        self,
        tensor: Tensor,
        layout: ParameterLayout,
        *,
        unit: Conversions,
        source: UnitPart,
        synchronized: bool = False,
        in_use: set[Part] | None = None,
        name: str = "",
        order: CollectiveOrder | None = None,
    ) -> None:
        self._name, self._order = name, order
        self._in_use = set() if in_use is None else in_use
        self.tensor = tensor
        self.layout = layout
        self.source = source
        self.synchronized = synchronized
        self.in_programs = False  # whether one has used it, so that the whole is not all that a loss hangs on
        self._unit = unit
        self._value: Tensor | None = None
        self._node: Tensor | None = None
        self._made_of: tuple[int, int] = (0, 0)  # version and address of the local tensor
        self._seen: Seen | None = None

    @property
    def unit_size(self) -> int:
        """Over how many ranks of the unit it is a part, or a summand."""
        return self._unit.size

    @property
    @override
    def description(self) -> Tensor:
        """A tensor of the logical shape and no storage."""
        return torch.empty(self.layout.shape, dtype=self.tensor.dtype, device="meta")

    @property
    def is_kept(self) -> bool:
        """Whether the whole is there, so that it may have been changed."""
        return self._value is not None

    @override
    def whole(self) -> Tensor:
        """The whole, differentiable where gradients are recorded and wanted. Collective."""
        with local_mode():
            value = self._gathered()
            if not (torch.is_grad_enabled() and self.tensor.requires_grad):
                return value
            if self._node is None:
                self._node = self._differentiable(value)
            return self._node

    @override
    def value(self) -> Tensor:
        """The whole, without gradient; changing it in place changes the parameter. Collective."""
        with local_mode():
            return self._gathered()

    @override
    def flush(self) -> None:
        """Write back what was changed in place since."""
        with local_mode():
            if self._value is not None and self._seen is not None and self._seen.is_changed(self._value):
                self._write(self._value)

    @override
    def assign(self, whole: Tensor) -> None:
        """Take over a tensor of the logical shape, as ``parameter.data = whole`` does."""
        if isinstance(whole, Guard):
            whole = whole._part.value()
        if tuple(whole.shape) != self.layout.shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} cannot become the data of a tensor of shape "
                f"{self.layout.shape} that is stored in parts."
            )
        with local_mode(), torch.no_grad():
            local, own = self.tensor, self.layout.unit_part(whole.detach())
            if self._source_of_data is not None and self._source_of_data.is_still(whole, own):
                return
            self._source_of_data = Source(whole, own)
            if (whole.dtype, whole.device) == (local.dtype, local.device):
                self._write(whole.detach())
            else:
                self.source.replace(own)
                self._forget()

    def release(self) -> None:
        """Free the whole; who still needs it for a backward keeps it."""
        self.flush()
        if self._source_of_data is not None and not self._source_of_data.is_shared:
            self._source_of_data = None
        self._forget()

    def gradient(self, gradient: Tensor) -> Part:
        """What is known of this parameter's gradient."""
        return self._beside(gradient, f"the gradient of {self._name}")

    def state(self, value: Tensor, name: str) -> Part | None:
        """What is known of a tensor in the optimizer's state; None if it is not cut like the parameter."""
        if self.layout.is_whole or tuple(value.shape) != self.layout.local_shape:
            return None
        return self._beside(value, f"'{name}' of {self._name} in the optimizer's state")

    def _beside(self, tensor: Tensor, name: str) -> Part:
        """What is known of a tensor that is stored as this one is."""
        return Part(
            tensor,
            self.layout,
            unit=self._unit,
            source=LocalPart(tensor) if self.gradients is None else self.gradients.source_of(tensor),
            in_use=self._in_use,
            name=name,
            order=self._order,
        )

    def share(self, gradient: Tensor) -> Part:
        """What is known of a gradient on its way to this parameter, with all rows."""
        return Part(
            gradient,
            replace(self.layout, rows=None),
            unit=self._unit,
            source=Summand(gradient, self._unit) if self.synchronized else LocalPart(gradient),
            name=f"the gradient of {self._name}, in a hook",
            order=self._order,
        )

    # --- what user code sees of gradients -----------------------------------------------------

    @override
    def gradient_shown(self) -> Tensor | None:
        """What whoever reads the gradient of a parameter gets; nothing is gathered yet."""
        with local_mode():
            gradient = self.tensor.grad
            if gradient is None or self.gradients is None or self.gradients.are_whole():
                self.shown = None
                return gradient
            if self.shown is None or self.shown._local is not gradient:
                self.shown = _show(self, gradient)
            return cast(Tensor, self.shown)

    @override
    def gradient_given(self, gradient: Any) -> None:
        """Let a parameter have another gradient, of which it gets its part; None for none."""
        with local_mode():
            if gradient is None:
                self.tensor.grad = self.shown = None
                return
            if isinstance(gradient, _Shown):
                gradient._part.flush()
                if gradient._of is self:
                    self.tensor.grad = gradient._local
                    return
                gradient = gradient._part.value().clone()
            self.shown = None
            if not isinstance(gradient, Tensor):
                self.tensor.grad = gradient
                return
            if tuple(gradient.shape) != self.layout.shape:
                raise RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} is given to a parameter of shape "
                    f"{self.layout.shape}."
                )
            if self.tensor.grad is None:
                refuse_unequal_gradient(gradient, self._name)
            if not self.layout.is_whole:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = self.layout.local_part(dense).clone()
            self.tensor.grad = gradient
            if self.gradients is not None:
                self.gradients.assigned()

    @override
    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        """Register a hook that sees the whole gradient, and whose answer counts in part."""

        def heard(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else self._hear(gradient, hook)

        is_of_tensor = register is torch.Tensor.register_hook
        with local_mode():
            return register(self.tensor, heard if is_of_tensor else hook)

    def _hear(self, gradient: Tensor, hook: Callable[..., Any]) -> Tensor | None:
        with local_mode():
            shown = _show(self, gradient)
            shown._part = share = self.share(gradient)
            with guarded_mode():
                answer = hook(shown)
            share.flush()
            if answer is None or answer is shown:
                return None
            whole = answer._part.value() if isinstance(answer, Guard) else answer
            changed = share.layout.unit_part(whole)
            return changed / self.unit_size if self.synchronized else changed

    @override
    def differentiated(self) -> list[Tensor]:
        if self.in_programs:
            raise UnsupportedError(
                "`torch.autograd.grad` is asked for gradients of a parameter that programs use in parts.",
                remedy="Call `backward` and read `.grad`, or use strategy 'nnscaler_dp'.",
            )
        return [self.whole()]

    # --- keeping ------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._value = self._node = self._seen = None
        self._in_use.discard(self)

    def _gathered(self) -> Tensor:
        self.flush()
        if self._value is None or self._made_of != self._local_state():
            self._forget()
            if self._order is not None and (self.layout.placement.is_shard or self.source.is_gathered):
                self._order.arrive(f"the gather of {self._name}, which user code reads or writes")
            with torch.inference_mode(False), torch.no_grad():
                value = self.source.value()
                if self.layout.placement.is_shard:
                    value = self._unit.whole(value, self.layout.placement.dim, self.layout.placement.groups)
                self._value = value
            self._in_use.add(self)
            self._made_of, self._seen = self._local_state(), Seen(value)
        return self._value

    def _local_state(self) -> tuple[int, int]:
        return self.tensor._version, self.tensor.data_ptr()

    def _differentiable(self, value: Tensor) -> Tensor:
        """The same values, with the way of gradients back to the parameter."""
        inside = self.source.differentiable()
        if self.layout.placement.is_shard:
            placement = self.layout.placement
            return _whole(inside, value, lambda g: self._unit.part(g, placement.dim, placement.groups))
        if self.synchronized:
            size = self._unit.size
            return _whole(inside, value, lambda g: g / size)
        return inside

    def _write(self, whole: Tensor) -> None:
        self.source.write(self.layout.unit_part(whole))
        if whole is not self._value:
            self._forget()
            return
        self._node = None  # it is a view of what has changed
        self._made_of, self._seen = self._local_state(), Seen(whole)


class _Shown(Guard, Tensor):  # type: ignore[misc] # their __repr__ differ
    """Stands for the gradient of a guarded parameter, whole; it shares memory with the local one.

    Attributes:
        _of: The parameter's part.
        _local: The gradient of the local part.
    """

    _of: Part
    _local: Tensor

    @cached_property
    def _part(self) -> Part:  # type: ignore[override]
        with local_mode():
            return self._of.gradient(self._local)


def _show(part: Part, gradient: Tensor) -> _Shown:
    shown: Any = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach()
    shown.__class__ = _Shown
    shown._of, shown._local = part, gradient
    return cast(_Shown, shown)


class _Whole(torch.autograd.Function):
    """The gathered value in place of the part; the gradient's way back is given."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = backward
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(gradient), None, None


def _whole(part: Tensor, value: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Whole.apply(part, value, backward)  # type: ignore[no-untyped-call]
    return result
