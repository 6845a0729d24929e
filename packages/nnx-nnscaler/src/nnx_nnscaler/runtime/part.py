"""Gather and write back a sharded parameter, its gradient or its optimizer state for user code.

`ParameterLayout` describes the shard of one rank. `Part` gathers the full tensor at its first use, keeps it
until the end of the step, and writes changes back to the shards. User code reads ``parameter.grad`` as a
stand-in of the full gradient, which gathers only when a value is read. In local mode ``grad`` is the local
gradient. `nnx_core.view.guard` decides when user code sees full tensors, `storage` stores the shards, and
`zero` the rows of ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from nnx_base._torch_compat import local_mode
from nnx_base.box import Box
from nnx_base.shard import Shard
from nnx_core._torch_compat import NO_BACKWARD, current_backward, guarded_mode
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import refuse_unequal_gradient
from nnx_core.errors import UnsupportedError
from nnx_core.view import guard as guards
from nnx_core.view.guard import Guard, guard, part_of
from nnx_core.view.guarded_parameters import AssignedData, Snapshot
from nnx_nnscaler.ir.placement import Placement, R
from nnx_nnscaler.runtime.functions import Conversions

# The position of one rank's shard in the full parameter.
#
# Two splits follow each other. A placement shards the parameter over the ranks of a plan unit; with ZeRO the
# ranks of the outer axis then share the rows of each shard. This section is arithmetic on shapes and boxes.


def rows_of(count: int, *, rank: int, size: int) -> tuple[int, int]:
    """Return the range of `count` rows that one of `size` ranks stores; the last ranks have fewer or none.

    Example:
        >>> [rows_of(5, rank=rank, size=4) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = math.ceil(count / size)
    return min(rank * most, count), min((rank + 1) * most, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The shard of one parameter that one rank stores.

    Attributes:
        shape: The logical shape, as on a single device.
        placement: The placement over the ranks of the unit, ``R`` or ``S``.
        unit_rank: The index of this rank in the unit.
        unit_size: The number of ranks of the unit.
        rows: The range of dim 0 of the unit's shard that this rank stores; None for all rows.
        is_here: False if another stage of a pipeline stores it, so that this rank has none of its elements.
        is_everywhere: False if only one stage of a pipeline stores it.
    """

    shape: tuple[int, ...]
    placement: Placement = R
    unit_rank: int = 0
    unit_size: int = 1
    rows: tuple[int, int] | None = None
    is_here: bool = True
    is_everywhere: bool = True

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard within the unit, with all rows."""
        return self.placement.local_shape(self.shape, self.unit_size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this rank stores."""
        if not self.is_here:
            return (0, *self.shape[1:])
        if self.rows is None:
            return self.unit_shape
        start, stop = self.rows
        return (stop - start, *self.unit_shape[1:])

    @property
    def is_whole(self) -> bool:
        """True if this rank stores the full parameter."""
        return self.is_everywhere and self.local_shape == self.shape

    def unit_part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard within the unit of a full tensor; a view unless it has groups."""
        if not self.is_here:
            return whole.new_empty(self.local_shape)
        if not self.placement.is_shard:
            return whole
        dim, groups = self.placement.dim, self.placement.groups
        if groups == 1:
            return whole.chunk(self.unit_size, dim)[self.unit_rank]
        # Each rank has an equal share of every group, such as of query, key and value in one weight.
        grouped = torch.unflatten(whole, dim, (groups, -1))
        return grouped.chunk(self.unit_size, dim + 1)[self.unit_rank].flatten(dim, dim + 1)

    def local_part(self, whole: Tensor) -> Tensor:
        """Return the local shard of a full tensor."""
        return self.stored_rows(self.unit_part(whole))

    def stored_rows(self, unit_part: Tensor) -> Tensor:
        """Return the rows of the unit's shard that this rank stores, as a view."""
        if self.rows is None or not self.is_here:
            return unit_part
        return unit_part[self.rows[0] : self.rows[1]]

    def shard_of_local(self, tensor: Tensor) -> Shard:
        """Describe a tensor of the local shape: the parameter, its gradient, or state of its optimizer.

        Example:
            >>> import torch
            >>> layout = ParameterLayout(shape=(4, 3), rows=(2, 4))
            >>> layout.shard_of_local(torch.zeros(2, 3)).boxes
            (Box(offset=(2, 0), size=(2, 3)),)
        """
        tensor = tensor.detach()
        pieces = list(self._pieces())
        boxes = tuple(box for box, _ in pieces)
        return Shard(self.shape, tensor.dtype, boxes, tuple(tensor[place.slices] for _, place in pieces))

    def _pieces(self) -> Iterator[tuple[Box, Box]]:
        """Yield every stored box: its box in the full tensor, and its box in the local one."""
        # The local tensor concatenates the boxes of a placement with groups along `dim`.
        if not self.is_here or (0 in self.local_shape and 0 not in self.shape):
            return
        local, reached = self.unit_shape, 0
        dim = self.placement.dim
        for box in self.placement.boxes(self.shape, rank=self.unit_rank, size=self.unit_size):
            place = Box(tuple(reached if d == dim else 0 for d in range(len(local))), box.size)
            if self.placement.is_shard:
                reached += box.size[dim]
            yield from self._stored(box, place)

    def _stored(self, box: Box, place: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the rows of one box that this rank stores."""
        if self.rows is None:
            yield box, place
            return
        kept = place.intersection(Box((self.rows[0], *(0,) * (len(place.size) - 1)), self.local_shape))
        if kept is not None:
            within = kept.relative_to(place)
            offset = tuple(a + b for a, b in zip(box.offset, within.offset, strict=True))
            yield Box(offset, kept.size), Box((kept.offset[0] - self.rows[0], *kept.offset[1:]), kept.size)


class UnitPart(Protocol):
    """The source of a rank's shard, within the unit, of one tensor. Used in local mode only."""

    @property
    def is_gathered(self) -> bool:
        """True if `value` runs a collective of its own; the bucket's gather of parameter rows is none."""

    def value(self) -> Tensor:
        """Return the shard without gradient."""

    def differentiable(self) -> Tensor:
        """Return the shard as a tensor whose gradients reach the parameter."""

    def write(self, value: Tensor) -> None:
        """Write other values in place; every rank of the axis passes the same."""

    def replace(self, value: Tensor) -> None:
        """Replace the values by ones of another dtype or on another device."""


class LocalPart:
    """A shard that this rank stores completely."""

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
    """A partial tensor; the sum over the ranks of the unit is the value."""

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
        # Equal summands: their sum over the unit is the value again.
        with torch.no_grad():
            self._tensor.copy_(value / self._unit.size)

    def replace(self, value: Tensor) -> None:  # noqa: D102
        self._tensor.data = value / self._unit.size


class StagePart:
    """A shard that the ranks of one pipeline stage store and broadcast to the others.

    Args:
        tensor: The elements that this rank stores; empty if it stores none.
        inside: The shard on the ranks that store it.
        layout: The layout of the parameter.
        pipe: The group of this rank along the pipe.
        home: The rank in that group that stores the shard.
    """

    def __init__(
        self, tensor: Tensor, inside: UnitPart, layout: ParameterLayout, *, pipe: dist.ProcessGroup, home: int
    ) -> None:
        self.inside = inside
        self._tensor = tensor
        self._layout = layout
        self._pipe = pipe
        self._home = home

    def of(self, gradient: Tensor, inside: UnitPart) -> StagePart:
        """Return the source of a tensor that is stored on the same stage."""
        return StagePart(gradient, inside, self._layout, pipe=self._pipe, home=self._home)

    @property
    def is_gathered(self) -> bool:  # noqa: D102 # as the protocol says, here and below
        return self.inside.is_gathered if self._is_read_alone else True

    @property
    def _is_read_alone(self) -> bool:
        """True if a hook reads it in the backward of its own stage."""
        # The other stages run no such hook, so a broadcast would wait for them forever.
        return self._layout.is_here and current_backward() != NO_BACKWARD

    def value(self) -> Tensor:  # noqa: D102
        if self._is_read_alone:
            return self.inside.value()
        if self._layout.is_here:
            value = self.inside.value().contiguous()
        else:
            value = self._tensor.new_empty(self._layout.unit_shape)
        dist.broadcast(value, group=self._pipe, group_src=self._home)
        return value

    def differentiable(self) -> Tensor:  # noqa: D102
        return self.inside.differentiable() if self._layout.is_here else self._tensor

    def write(self, value: Tensor) -> None:  # noqa: D102
        if self._layout.is_here:
            self.inside.write(value)

    def replace(self, value: Tensor) -> None:  # noqa: D102
        if self._layout.is_here:
            self.inside.replace(value)
        else:
            self._tensor.data = value


class GradientParts(Protocol):
    """The sharding of one guarded parameter's gradients. Used in local mode only."""

    def are_whole(self) -> bool:
        """Return True if this rank stores the full gradient."""

    def source_of(self, gradient: Tensor) -> UnitPart:
        """Return the source of a gradient's shard within the unit."""

    def assigned(self) -> None:
        """Record that user code set another gradient."""


class Part(guards.Part):
    """The guard of one sharded tensor; it keeps the full tensor while user code uses it.

    Args:
        tensor: The local shard of a parameter, of its gradient, or of optimizer state.
        layout: The layout of the parameter.
        unit: The collectives of the plan unit.
        source: The source of the shard within the unit.
        synchronized: True if the reducer sums its gradients over the unit.
        in_use: The set that the guard joins while it keeps the full tensor.
        name: The name used in errors.
        order: The check for gathers that only some ranks start.
        on_write: A function that gets the new full tensor after user code has changed it.

    Attributes:
        gradients: The sharding of a parameter's gradients; None if they are full.
        shown: The stand-in that user code read as the gradient last.
        of: The part of the parameter, if this is its gradient.
    """

    gradients: GradientParts | None = None
    shown: Tensor | None = None
    of: Part | None = None
    _source_of_data: AssignedData | None = None

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
        on_write: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._name, self._order, self._on_write = name, order, on_write
        self._in_use = set() if in_use is None else in_use
        self.tensor = tensor
        self.layout = layout
        self.source = source
        self.synchronized = synchronized
        # True once generated code has used the shard: a loss then depends on more than the full tensor.
        self.in_programs = False
        self._unit = unit
        self._value: Tensor | None = None
        self._node: Tensor | None = None
        # The version and address of the local tensor when `_value` was gathered.
        self._made_of: tuple[int, int] = (0, 0)
        self._seen: Snapshot | None = None

    @property
    def unit_size(self) -> int:
        """The number of ranks of the unit that shard or sum it."""
        return self._unit.size

    @property
    @override
    def description(self) -> Tensor:
        """A meta tensor of the logical shape."""
        return torch.empty(self.layout.shape, dtype=self.tensor.dtype, device="meta")

    @property
    def is_kept(self) -> bool:
        """True if the full tensor is kept, so that user code may have changed it."""
        return self._value is not None

    @override
    def unsharded(self) -> Tensor:
        """Return the full tensor, differentiable if gradients are recorded and wanted. Collective."""
        with local_mode():
            value = self._gathered()
            if not (torch.is_grad_enabled() and self.tensor.requires_grad):
                return value
            if self._node is None:
                self._node = self._differentiable(value)
            return self._node

    @override
    def value(self) -> Tensor:
        """Return the full tensor without gradient; in-place changes reach the parameter. Collective."""
        with local_mode():
            return self._gathered()

    @override
    def flush(self) -> None:
        """Write in-place changes of the full tensor back."""
        with local_mode():
            if self._value is not None and self._seen is not None and self._seen.is_changed(self._value):
                self._write(self._value)

    @override
    def assign(self, values: Tensor) -> None:
        """Set the data to a full tensor, as ``parameter.data = values`` does."""
        if isinstance(values, Guard):
            values = values._part.value()
        if tuple(values.shape) != self.layout.shape:
            raise ValueError(
                f"a tensor of shape {tuple(values.shape)} cannot become the data of a tensor of shape "
                f"{self.layout.shape} that is sharded."
            )
        with local_mode(), torch.no_grad():
            local, own = self.tensor, self.layout.unit_part(values.detach())
            # The same tensor again, and unchanged: there is nothing to write.
            if self._source_of_data is not None and self._source_of_data.is_still(values, own):
                return
            self._source_of_data = AssignedData(values, own)
            if (values.dtype, values.device) == (local.dtype, local.device):
                self._write(values.detach())
            else:
                self.source.replace(own)
                self._forget()

    def release(self) -> None:
        """Free the full tensor; graphs that need it for backward keep it."""
        self.flush()
        if self._source_of_data is not None and not self._source_of_data.is_shared:
            self._source_of_data = None
        self._forget()

    def gradient(self, gradient: Tensor) -> Part:
        """Return the guard of this parameter's gradient."""
        part = self._alike(gradient, f"the gradient of {self._name}")
        part.of = self
        return part

    def state(self, value: Tensor, name: str) -> Part | None:
        """Return the guard of a tensor of optimizer state; None if it is not sharded like the parameter."""
        if self.layout.is_whole or tuple(value.shape) != self.layout.local_shape:
            return None
        return self._alike(value, f"'{name}' of {self._name} in the optimizer's state")

    def _alike(self, tensor: Tensor, name: str) -> Part:
        """Return the guard of a tensor that is sharded like this one."""
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
        """Return the guard of a gradient in a hook, before its reduction."""
        return Part(
            gradient,
            # ZeRO shares the rows out only when the gradient is reduced.
            replace(self.layout, rows=None),
            unit=self._unit,
            source=Summand(gradient, self._unit) if self.synchronized else LocalPart(gradient),
            name=f"the gradient of {self._name}, in a hook",
            order=self._order,
        )

    @override
    def gradient_shown(self) -> Tensor | None:
        """Return the stand-in that user code reads as the gradient; it gathers nothing yet."""
        with local_mode():
            gradient = self.tensor.grad
            if gradient is None or self.gradients is None or self.gradients.are_whole():
                self.shown = None
                return gradient
            part = part_of(self.shown)
            if part is None or part.tensor is not gradient:
                self.shown = _show(self.gradient(gradient), gradient)
            return self.shown

    @override
    def gradient_given(self, gradient: Any) -> None:
        """Set the shard of a full gradient as the parameter's gradient; None clears it."""
        with local_mode():
            if gradient is None:
                self.tensor.grad = self.shown = None
                return
            known = part_of(gradient)
            if known is not None:
                known.flush()
                # The parameter's own gradient, set again, needs no gather.
                if isinstance(known, Part) and known.of is self:
                    self.tensor.grad = known.tensor
                    return
                gradient = known.value().clone()
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
        """Register a hook that gets the full gradient; autograd continues with the shard of its result."""

        def on_gradient(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else self._call_hook(gradient, hook)

        # Other hooks get the parameter, not its gradient.
        is_of_tensor = register is torch.Tensor.register_hook
        with local_mode():
            return register(self.tensor, on_gradient if is_of_tensor else hook)

    def _call_hook(self, gradient: Tensor, hook: Callable[..., Any]) -> Tensor | None:
        with local_mode():
            share = self.share(gradient)
            shown = _show(share, gradient)
            # The hook is user code, which sees full tensors of other parameters too.
            with guarded_mode():
                answer = hook(shown)
            share.flush()
            if answer is None or answer is shown:
                return None
            whole = answer._part.value() if isinstance(answer, Guard) else answer
            changed = share.layout.unit_part(whole)
            # The reducer sums over the unit, so each rank passes an equal summand on.
            return changed / self.unit_size if self.synchronized else changed

    @override
    def differentiated(self) -> list[Tensor]:
        if self.in_programs or not self.layout.is_everywhere:
            raise UnsupportedError(
                "`torch.autograd.grad` asks for gradients of a parameter that programs use as shards.",
                remedy="Call `backward` and read `.grad`, or use strategy 'nnscaler_dp'.",
            )
        return [self.unsharded()]

    def _forget(self) -> None:
        self._value = self._node = self._seen = None
        self._in_use.discard(self)

    def _gathered(self) -> Tensor:
        self.flush()
        # An optimizer or a load that changed the shard in local mode makes the kept full tensor stale.
        if self._value is None or self._made_of != self._local_state():
            self._forget()
            if self._order is not None and (self.layout.placement.is_shard or self.source.is_gathered):
                self._order.arrive(f"the gather of {self._name}, which user code reads or writes")
            # An inference tensor could not be kept for a later training step.
            with torch.inference_mode(False), torch.no_grad():
                value = self.source.value()
                if self.layout.placement.is_shard:
                    value = self._unit.whole(value, self.layout.placement.dim, self.layout.placement.groups)
                self._value = value
            self._in_use.add(self)
            self._made_of, self._seen = self._local_state(), Snapshot(value)
        return self._value

    def _local_state(self) -> tuple[int, int]:
        return self.tensor._version, self.tensor.data_ptr()

    def _differentiable(self, value: Tensor) -> Tensor:
        """Return the full tensor with a backward that gives the shard its gradient."""
        inside = self.source.differentiable()
        # On other stages the shard is empty, and so is its gradient.
        if not self.layout.is_here:
            return _whole(inside, value, lambda g: g.new_zeros(self.layout.local_shape))
        if self.layout.placement.is_shard:
            placement = self.layout.placement
            return _whole(inside, value, lambda g: self._unit.part(g, placement.dim, placement.groups))
        # Each rank of the unit computes the full gradient, and the reducer sums over the unit.
        if self.synchronized:
            size = self._unit.size
            return _whole(inside, value, lambda g: g / size)
        return inside.view_as(inside) if inside is self.tensor else inside

    def _write(self, whole: Tensor) -> None:
        if self._on_write is not None:
            self._on_write(whole)
        self.source.write(self.layout.unit_part(whole))
        if whole is not self._value:
            self._forget()
            return
        # It is a view of the full tensor from before the change.
        self._node = None
        self._made_of, self._seen = self._local_state(), Snapshot(whole)


def _show(part: Part, gradient: Tensor) -> Tensor:
    """Return a guarded tensor for user code, which shares memory with a local gradient."""
    shown = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach()
    guard(shown, part)
    return shown


class _Whole(torch.autograd.Function):
    """Replaces a shard by the full tensor in autograd; `backward` makes the shard's gradient."""

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
