"""What is known of a tensor that this rank stores in part: where the parts are, the whole while it is used.

It owns gathering, keeping and writing back the whole of a parameter or a gradient. Who gets to see it is
`parameter`'s business, where parts are stored `storage`'s, ZeRO's rows `zero`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nnx_nnscaler.runtime.conversions import Conversions
from nnx_nnscaler.runtime.layout import ParameterLayout

__all__ = ["GradientParts", "LocalPart", "Part", "Summand", "UnitPart", "guarded_mode", "local_mode"]

local_mode = torch._C.DisableTorchFunctionSubclass
"""Context in which parameters in parts are plain local tensors, on this thread."""
guarded_mode = torch._C._EnableTorchFunction
"""Context, within local mode, in which the user's code sees whole parameters again."""


class UnitPart(Protocol):
    """Where a rank finds its part, within the unit, of one parameter. Used in local mode only."""

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


class Part:
    """What is known of one guarded tensor, and its whole while someone uses it.

    Args:
        tensor: What this rank stores of it: a parameter, or the gradient of one.
        layout: Which part.
        unit: Collectives of the plan unit.
        source: Where its part within the unit comes from.
        synchronized: Whether the reducer sums its gradients over the unit.
        in_use: Where it puts itself while it keeps the whole.

    Attributes:
        gradients: What a parameter's gradients are parts of; None where they are whole.
        shown: What the last one to look at the gradient was given.
    """

    gradients: GradientParts | None = None
    shown: Any = None

    def __init__(
        self,
        tensor: Tensor,
        layout: ParameterLayout,
        *,
        unit: Conversions,
        source: UnitPart,
        synchronized: bool = False,
        in_use: set[Part] | None = None,
    ) -> None:
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
        self._version = 0  # of the whole when it was last equal to the parts

    @property
    def unit_size(self) -> int:
        """Over how many ranks of the unit it is a part, or a summand."""
        return self._unit.size

    @property
    def description(self) -> Tensor:
        """A tensor of the logical shape and no storage."""
        return torch.empty(self.layout.shape, dtype=self.tensor.dtype, device="meta")

    @property
    def is_kept(self) -> bool:
        """Whether the whole is there, so that it may have been changed."""
        return self._value is not None

    def whole(self) -> Tensor:
        """The whole, differentiable where gradients are recorded and wanted. Collective."""
        with local_mode():
            value = self._gathered()
            if not (torch.is_grad_enabled() and self.tensor.requires_grad):
                return value
            if self._node is None:
                self._node = self._differentiable(value)
            return self._node

    def value(self) -> Tensor:
        """The whole, without gradient; changing it in place changes the parameter. Collective."""
        with local_mode():
            return self._gathered()

    def flush(self) -> None:
        """Write back what was changed in place since."""
        with local_mode():
            if self._value is not None and self._value._version != self._version:
                self._write(self._value)

    def assign(self, whole: Tensor) -> None:
        """Take over a tensor of the logical shape, as ``parameter.data = whole`` does."""
        if tuple(whole.shape) != self.layout.shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} cannot become the data of a tensor of shape "
                f"{self.layout.shape} that is stored in parts."
            )
        with local_mode(), torch.no_grad():
            local = self.tensor
            if (whole.dtype, whole.device) == (local.dtype, local.device):
                self._write(whole.detach())
            else:
                self.source.replace(self.layout.unit_part(whole.detach()))
                self._forget()

    def release(self) -> None:
        """Free the whole; who still needs it for a backward keeps it."""
        self.flush()
        self._forget()

    def gradient(self, gradient: Tensor) -> Part:
        """What is known of this parameter's gradient."""
        source = LocalPart(gradient) if self.gradients is None else self.gradients.source_of(gradient)
        return Part(gradient, self.layout, unit=self._unit, source=source, in_use=self._in_use)

    def share(self, gradient: Tensor) -> Part:
        """What is known of a gradient on its way to this parameter, with all rows."""
        return Part(
            gradient,
            replace(self.layout, rows=None),
            unit=self._unit,
            source=Summand(gradient, self._unit) if self.synchronized else LocalPart(gradient),
        )

    def _forget(self) -> None:
        self._value = self._node = None
        self._in_use.discard(self)

    def _gathered(self) -> Tensor:
        self.flush()
        if self._value is None or self._made_of != self._local_state():
            self._forget()
            with torch.inference_mode(False), torch.no_grad():
                value = self.source.value()
                if self.layout.placement.is_shard:
                    value = self._unit.whole(value, self.layout.placement.dim, self.layout.placement.groups)
                self._value = value
            self._in_use.add(self)
            self._made_of, self._version = self._local_state(), value._version
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
        self._made_of, self._version = self._local_state(), whole._version


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
