"""ZeRO: ranks along the outer axis store rows of parameters, gradients and optimizer state.

One flat buffer holds the rows of several parameters. A read of one of them gathers the complete bucket in one
collective, and starts to gather the next bucket. One reduce-scatter for each bucket reduces the gradients
while backward runs. ``param.grad`` then holds this rank's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce

from nnx_base._torch_compat import local_mode
from nnx_core._torch_compat import all_gather_into, guarded_mode, reduce_scatter_into
from nnx_core.agree.announced_waits import wait_for_collective
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.runtime.buckets import DENSE, Bucket, assign_buckets
from nnx_nnscaler.runtime.part import ParameterLayout

if TYPE_CHECKING:
    from nnx_nnscaler.runtime.reducer import Reducer


class RowPart:
    """One parameter that is stored in rows: its place in the bucket, and its shard within the unit.

    Args:
        index: The number of the parameter in the reducer.
        parameter: The parameter with this rank's rows as data. The bucket moves them to its buffer.
        layout: The layout of the parameter, with its rows.
        name: The name used in errors.
        start: The index of its first element in the flat buffer of every rank.
        room: The number of its elements in the buffer: those of the rank with the most rows.
    """

    is_gathered = False

    def __init__(
        self,
        index: int,
        parameter: nn.Parameter,
        layout: ParameterLayout,
        *,
        name: str,
        start: int,
        room: int,
    ) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.layout = layout
        self.start, self.room = start, room
        self.bucket: RowBucket
        self._value: Tensor | None = None
        self._node: Tensor | None = None
        self._made_of = (0, 0)

    def value(self) -> Tensor:
        """Return all rows, without gradient."""
        if self._value is None or self._made_of != self._local_state():
            self.bucket.gather(self)
        return cast(Tensor, self._value)

    def differentiable(self) -> Tensor:
        """Return all rows; their gradient goes to the bucket."""
        value = self.value()
        if not (torch.is_grad_enabled() and self.parameter.requires_grad):
            return value
        if self._node is None:
            # An anchor stands in for the parameter, whose hooks must run only when its gradient is reduced.
            anchor = value.new_empty(0).requires_grad_()
            self._node = _Rows.apply(anchor, value, self)  # type: ignore[no-untyped-call]
        return self._node

    def write(self, value: Tensor) -> None:
        """Replace the values of all rows."""
        with torch.no_grad():
            self.parameter.copy_(self.layout.stored_rows(value))
            if self._value is not None and self._value.data_ptr() != value.data_ptr():
                self._value.copy_(value)
        self._made_of = self._local_state()

    def replace(self, value: Tensor) -> None:
        """Refuse another dtype or device, because a bucket has one."""
        raise UnsupportedError(
            f"parameters that are stored in rows cannot become {value.dtype} on {value.device}.",
            remedy="Convert or move the module before it is set up, or choose `precision`.",
        )

    def fill(self, gathered: Tensor) -> None:
        """Copy the rows of all ranks out of the gathered buffers."""
        # A copy: a view of one element for each rank would keep the complete buffer.
        own = gathered[:, self.start : self.start + self.room].contiguous().view(-1)
        shape = self.layout.unit_shape
        self._value = own[: math.prod(shape)].view(shape)
        self._made_of = self._local_state()

    def forget(self) -> None:
        """Free all rows of other ranks."""
        self._value = self._node = None

    def gathered(self, rows: Tensor) -> Tensor:
        """Return all rows of a tensor with the parameter's layout. Collective."""
        shape, parts = self.layout.unit_shape, self.bucket.axes
        sent = rows.new_zeros(self.room)
        sent[: rows.numel()] = rows.reshape(-1)
        received = rows.new_empty(parts.part_size * self.room)
        all_gather_into(received, sent, group=parts.parts)
        return received[: math.prod(shape)].view(shape)

    def collect(self, gradient: Tensor) -> None:
        """Accept the gradient of all rows, as the parameter's hooks return it."""
        with local_mode(), torch.no_grad():
            for hook in tuple((self.parameter._backward_hooks or {}).values()):
                answer = hook(gradient)
                gradient = gradient if answer is None else answer
            self.bucket.reducer.expect(self.index)
            self.bucket.put(self.index, gradient)
            self.bucket.reducer.mark(self.index)

    def _local_state(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()


class _Rows(torch.autograd.Function):
    """All rows, as an autograd function whose gradient ends in the bucket."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, part: RowPart) -> Tensor:
        ctx.part = part
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.part.collect(gradient)
        return None, None, None


class RowBucket(Bucket):
    """Parameters whose rows are gathered together and whose gradients are reduced together.

    Args:
        parts: The parameters; their rows move into the bucket's buffer.
        axes: This rank's groups.
        synchronized: True to sum gradients over the unit too.
        order: The check for gathers that only some ranks start.
    """

    always = True
    reducer: Reducer

    def __init__(
        self, parts: Sequence[RowPart], axes: Axes, *, synchronized: bool, order: CollectiveOrder | None
    ) -> None:
        super().__init__([part.index for part in parts])
        self.parts = list(parts)
        self._order = order
        self._gather_name = f"the gather of {' to '.join(dict.fromkeys((parts[0].name, parts[-1].name)))}"
        self.next: RowBucket | None = None
        self._by_index = {part.index: part for part in parts}
        self.axes = axes
        self._synchronized = synchronized
        first = parts[0].parameter
        self.device = first.device
        self._rows = torch.zeros(parts[-1].start + parts[-1].room, dtype=first.dtype, device=first.device)
        self._gathered: Tensor | None = None
        self._gathering: dist.Work | None = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._came: set[int] = set()
        self._work: dist.Work | None = None
        for part in parts:
            part.bucket = self
            own = self._place(part)
            own.copy_(part.parameter.data)
            part.parameter.data = own

    def _place(self, part: RowPart) -> Tensor:
        """Return the place of a parameter's rows in the buffer."""
        shape = part.layout.local_shape
        return self._rows[part.start : part.start + math.prod(shape)].view(shape)

    def gather(self, reader: RowPart) -> None:
        """Gather all rows of every parameter. Collective.

        Args:
            reader: The parameter to read. Ranks may read different ones of a bucket at the same time.
        """
        if self._order is not None:
            self._order.arrive(self._gather_name, cause=f", to read {reader.name}")
        with torch.inference_mode(False), torch.no_grad():
            if any(part._value is not None for part in self.parts):
                self.release()  # the rows have changed since the last gather
            self.prefetch()
            if self._gathering is not None:
                wait_for_collective(self._gathering, self._gather_name)
            if self._gathered is not None:
                for part in self.parts:
                    part.fill(self._gathered)
            self._gathered = self._gathering = None
            if self.next is not None and all(part._value is None for part in self.next.parts):
                self.next.prefetch()

    def prefetch(self) -> None:
        """Start to gather, unless a gather has started."""
        if self._gathered is not None:
            return
        for part in self.parts:
            place = self._place(part)
            if place.data_ptr() != part.parameter.data_ptr():
                place.copy_(part.parameter)  # user code has set other data
        size = self.axes.part_size
        self._gathered = self._rows.new_empty((size, self._rows.numel()))
        self._gathering = all_gather_into(
            self._gathered.view(-1), self._rows, group=self.axes.parts, async_op=True
        )

    def release(self) -> None:
        """Free all rows of other ranks."""
        gathering, self._gathering = self._gathering, None  # never wait twice for a failed gather
        if gathering is not None:
            wait_for_collective(gathering, self._gather_name)
        self._gathered = None
        for part in self.parts:
            part.forget()

    def start(self) -> None:  # noqa: D102 # the base class has the docstring
        self._sent = self._rows.new_empty((self.axes.part_size, self._rows.numel()))
        self._came = set()

    def put(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of all rows of a member."""
        slot = self._slot(index)
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
        if flat.numel() < slot.numel():
            flat = torch.cat([flat, flat.new_zeros(slot.numel() - flat.numel())])
        scale = 1 / self.axes.outer_size
        if index in self._came:
            slot.add_(flat.view(slot.shape), alpha=scale)
        else:
            torch.mul(flat.view(slot.shape), scale, out=slot)
        self._came.add(index)

    def fill(self, used: list[int]) -> None:  # noqa: D102
        for index in self.members:
            if index in self._came:
                used[index] = DENSE
            else:
                self._slot(index).zero_()

    def _slot(self, index: int) -> Tensor:
        part = self._by_index[index]
        return cast(Tensor, self._sent)[:, part.start : part.start + part.room]

    def launch(self) -> None:  # noqa: D102
        if self._sent is None:
            return
        self._received = torch.empty_like(self._rows)
        self._work = reduce_scatter_into(
            self._received, self._sent.view(-1), group=self.axes.parts, async_op=True
        )

    def wait(self) -> None:  # noqa: D102
        if self._work is None or self._received is None:
            return
        wait_for_collective(self._work, "a reduction of gradients")
        if self._synchronized and self.axes.unit is not None:
            all_reduce(self._received, group=self.axes.unit)
        if self.axes.copies is not None:
            all_reduce(self._received, group=self.axes.copies)

    def hand_out(self, index: int, kind: int) -> None:  # noqa: D102
        part = self._by_index[index]
        if self._received is None:
            return
        shape = part.layout.local_shape
        rows = self._received[part.start : part.start + math.prod(shape)].view(shape)
        if part.parameter.grad is None:
            part.parameter.grad = rows
        else:
            part.parameter.grad.add_(rows)
        for hook in tuple((part.parameter._post_accumulate_grad_hooks or {}).values()):
            with guarded_mode():
                hook(part.parameter)

    def end(self) -> None:  # noqa: D102
        self._sent = self._received = self._work = None
        self._came = set()


def make_row_buckets(
    parameters: Sequence[tuple[str, nn.Parameter, ParameterLayout]],
    axes: Axes,
    *,
    first: int,
    limit: int,
    synchronized: set[nn.Parameter],
    order: CollectiveOrder | None,
) -> list[RowBucket]:
    """Put the rows of parameters into buckets.

    Args:
        parameters: The parameters in the model's order, with names and layouts; their data are this rank's
            rows.
        axes: This rank's groups.
        first: The number of the first parameter in the reducer.
        limit: The bytes of a bucket, counting all rows.
        synchronized: The parameters whose gradients are summed over the unit too.
        order: The check for gathers that only some ranks start.
    """
    buckets: list[RowBucket] = []
    for is_synchronized in (False, True):
        own = [
            i
            for i, (_, parameter, _) in enumerate(parameters)
            if (parameter in synchronized) == is_synchronized
        ]
        wholes = [
            torch.empty(parameters[i][2].unit_shape, dtype=parameters[i][1].dtype, device="meta") for i in own
        ]
        for places in assign_buckets(wholes, [limit]):
            parts: list[RowPart] = []
            for i in (own[place] for place in places):
                name, parameter, layout = parameters[i]
                start = parts[-1].start + parts[-1].room if parts else 0
                room = _room(layout, axes.part_size)
                parts.append(RowPart(first + i, parameter, layout, name=name, start=start, room=room))
            buckets.append(RowBucket(parts, axes, synchronized=is_synchronized, order=order))
    buckets.sort(key=lambda bucket: bucket.members[0])
    for bucket, following in pairwise(buckets):
        bucket.next = following
    return buckets


def _room(layout: ParameterLayout, size: int) -> int:
    """Return the number of elements on the rank with the most rows."""
    rows, *rest = layout.unit_shape
    return math.ceil(rows / size) * math.prod(rest)
