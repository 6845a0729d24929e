"""ZeRO: ranks along the outer axis store rows of parameters, gradients and optimizer state.

Rows of several parameters lie in one flat buffer. When one of them is needed the whole bucket is gathered in
one collective, and the next bucket's starts. Their gradients go back in one reduce-scatter for each bucket,
while backward runs, and end up in ``param.grad`` as rows.
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
    """One parameter of which this rank stores rows: its place in the bucket, and its part within the unit.

    Args:
        index: Its number in the reducer.
        parameter: Its data are this rank's rows; the bucket takes them over.
        layout: Says which rows these are.
        name: The name used in errors.
        start: Its place in the flat buffer of every rank.
        room: Elements it takes there: as many as the rank with the most rows stores.
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
        """All rows, without gradient."""
        if self._value is None or self._made_of != self._local_state():
            self.bucket.gather(self)
        return cast(Tensor, self._value)

    def differentiable(self) -> Tensor:
        """All rows; their gradient goes to the bucket."""
        value = self.value()
        if not (torch.is_grad_enabled() and self.parameter.requires_grad):
            return value
        if self._node is None:
            # Not the parameter: its hooks are called where its gradient is.
            anchor = value.new_empty(0).requires_grad_()
            self._node = _Rows.apply(anchor, value, self)  # type: ignore[no-untyped-call]
        return self._node

    def write(self, value: Tensor) -> None:
        """Take over other values for all rows."""
        with torch.no_grad():
            self.parameter.copy_(self.layout.stored_rows(value))
            if self._value is not None and self._value.data_ptr() != value.data_ptr():
                self._value.copy_(value)
        self._made_of = self._local_state()

    def replace(self, value: Tensor) -> None:
        """Refuse another dtype or device: the bucket has one."""
        raise UnsupportedError(
            f"parameters that are stored in rows cannot become {value.dtype} on {value.device}.",
            remedy="Convert or move the module before it is set up, or choose `precision`.",
        )

    def fill(self, gathered: Tensor) -> None:
        """Take the rows of all ranks out of the gathered buffers."""
        own = gathered[:, self.start : self.start + self.room].reshape(-1)
        shape = self.layout.unit_shape
        self._value = own[: math.prod(shape)].view(shape)
        self._made_of = self._local_state()

    def forget(self) -> None:
        """Free all rows but this rank's."""
        self._value = self._node = None

    def gathered(self, rows: Tensor) -> Tensor:
        """All rows of a tensor that is stored as the parameter is. Collective."""
        shape, parts = self.layout.unit_shape, self.bucket.axes
        sent = rows.new_zeros(self.room)
        sent[: rows.numel()] = rows.reshape(-1)
        received = rows.new_empty(parts.part_size * self.room)
        all_gather_into(received, sent, group=parts.parts)
        return received[: math.prod(shape)].view(shape)

    def collect(self, gradient: Tensor) -> None:
        """Take the gradient of all rows, as the parameter's hooks leave it."""
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
    """All rows; their gradient does not flow on but to the bucket."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, part: RowPart) -> Tensor:
        ctx.part = part
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.part.collect(gradient)
        return None, None, None


class RowBucket(Bucket):
    """Parameters whose rows are gathered together, and whose gradients are reduced together.

    Args:
        parts: Its parameters; their rows move into the bucket's buffer.
        axes: This rank's groups.
        synchronized: True if gradients are to be summed over the unit, too.
        order: Notices a gather that only some ranks come to.
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
        """The position of a parameter's rows in the buffer."""
        shape = part.layout.local_shape
        return self._rows[part.start : part.start + math.prod(shape)].view(shape)

    def gather(self, reader: RowPart) -> None:
        """Give every part all its rows. Collective.

        Args:
            reader: The owner of the requested rows. Ranks may request rows of different owners at once.
        """
        if self._order is not None:
            self._order.arrive(self._gather_name, cause=f", to read {reader.name}")
        with torch.inference_mode(False), torch.no_grad():
            if any(part._value is not None for part in self.parts):
                self.release()  # the rows have changed since
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
        """Start gathering, unless it has been."""
        if self._gathered is not None:
            return
        for part in self.parts:
            place = self._place(part)
            if place.data_ptr() != part.parameter.data_ptr():
                place.copy_(part.parameter)  # somebody gave the parameter other data
        size = self.axes.part_size
        self._gathered = self._rows.new_empty((size, self._rows.numel()))
        self._gathering = all_gather_into(
            self._gathered.view(-1), self._rows, group=self.axes.parts, async_op=True
        )

    def release(self) -> None:
        """Free all rows but this rank's."""
        gathering, self._gathering = self._gathering, None  # one that failed is not waited for again
        if gathering is not None:
            wait_for_collective(gathering, self._gather_name)
        self._gathered = None
        for part in self.parts:
            part.forget()

    def start(self) -> None:  # noqa: D102 # as the base class says
        self._sent = self._rows.new_empty((self.axes.part_size, self._rows.numel()))
        self._came = set()

    def put(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of all rows of a member; a further one in the same pass is added."""
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
    """Put rows of parameters into buckets.

    Args:
        parameters: The parameters in the model's order, with names and layouts; their data are this rank's
            rows.
        axes: This rank's groups.
        first: Number of the first one in the reducer.
        limit: Bytes of a bucket, all rows counted.
        synchronized: The parameters whose gradients are to be summed over the unit.
        order: Notices a gather that only some ranks come to.
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
    """Elements that the rank with the most rows stores."""
    rows, *rest = layout.unit_shape
    return math.ceil(rows / size) * math.prod(rest)
