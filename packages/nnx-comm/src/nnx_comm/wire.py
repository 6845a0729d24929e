"""Average a flat tensor over the ranks in few bytes: codecs, and the collectives that carry them.

A `Lossy` wire returns the mean and this rank's error, the part of its values that the mean lacks. The errors
are exact: over all ranks, values = ranks x mean + errors. So an algorithm that adds its error to the values
of the next step loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from nnx_core.agree.announced_waits import wait_for_collective

__all__ = [
    "Cast",
    "Codec",
    "Exact",
    "Int8",
    "Lossy",
    "Recoded",
    "Sent",
    "TopK",
    "Wire",
    "add_over_ranks",
    "largest",
    "make_wire",
    "swap",
]

BLOCK = 512
"""Elements that share one scale in `Int8`."""
MESSAGE = 512 * 1024
"""The bytes of the longest message to one rank over gloo."""
_DOING = "the exchange of a slow link's algorithm"


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The result of an exchange.

    Attributes:
        mean: The mean over the ranks, equal on all of them.
        error: The part of this rank's values that the mean lacks; None if it lacks nothing.
        payload: The bytes that this rank sent.
    """

    mean: Tensor
    error: Tensor | None
    payload: int


class Wire(ABC):
    """The form of a flat tensor between the ranks.

    Attributes:
        state: Tensors that are equal on all ranks and that a checkpoint stores, by name.
        group: The ranks that average their values; None for all.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def payload(self, count: int, *, ranks: int, itemsize: int) -> int:
        """Return the bytes that a rank sends for so many elements: the formula of the documentation."""


class Lossy(Wire):
    """Averages a flat tensor over the ranks with an error, which the next exchange can add."""

    @abstractmethod
    def mean(self, values: Tensor, shapes: Sequence[torch.Size]) -> Sent:
        """Average the values of all ranks. Collective.

        Args:
            values: This rank's values, flat; the method may write into them.
            shapes: The shapes of the tensors that they consist of.
        """


class Exact(Wire):
    """Numbers as they are, which torch's all-reduce sums as under ``ddp``."""

    def payload(self, count: int, *, ranks: int, itemsize: int) -> int:
        """Return the bytes of a ring all-reduce."""
        return 2 * (ranks - 1) * count * itemsize // ranks


class Codec(ABC):
    """Turns rows of numbers into rows of bytes, and back."""

    @abstractmethod
    def padded(self, count: int) -> int:
        """Return the length of a row of at least so many numbers that the codec can encode."""

    def rows(self, values: Tensor, count: int) -> Tensor:
        """Return flat values as so many rows, with zeros at the end of the last one."""
        length = self.padded(-(-values.numel() // count))
        return pad(values, (0, count * length - values.numel())).view(count, length)

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Return a row of bytes for each row of numbers."""

    @abstractmethod
    def decode(self, coded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return rows of so many numbers from rows of bytes."""

    @abstractmethod
    def row_bytes(self, count: int) -> int:
        """Return the bytes of a row of so many numbers."""


class Cast(Codec):
    """Numbers of two bytes; those too large for them become the largest.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def padded(self, count: int) -> int:
        """Return the count."""
        return count

    def encode(self, rows: Tensor) -> Tensor:
        """Round to the nearest number of two bytes."""
        largest = torch.finfo(self.dtype).max
        return rows.clamp(-largest, largest).to(self.dtype).view(torch.uint8)

    def decode(self, coded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers."""
        return coded.view(self.dtype).to(dtype)

    def row_bytes(self, count: int) -> int:
        """Return two bytes for each number."""
        return 2 * count


class Int8(Codec):
    """Whole numbers from -127 to 127, with a scale for each block of a row; zero stays zero."""

    def padded(self, count: int) -> int:
        """Return a multiple of the block."""
        block = min(BLOCK, max(count, 1))
        return -(-count // block) * block

    def encode(self, rows: Tensor) -> Tensor:
        """Round each number to the nearest multiple of its block's scale."""
        blocks = rows.reshape(len(rows), -1, min(BLOCK, rows.shape[1]))
        scales = blocks.abs().amax(2, keepdim=True).float() / 127
        codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        parts = (scales.flatten(1).view(torch.uint8), codes.to(torch.int8).flatten(1).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def decode(self, coded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Multiply the whole numbers by the scales."""
        scales = coded[:, :-count].reshape(-1).view(torch.float32).view(len(coded), -1).to(dtype)
        codes = coded[:, -count:].view(torch.int8)
        blocks = codes.to(dtype).reshape(len(coded), -1, min(BLOCK, count))
        return (blocks * scales.unsqueeze(2)).flatten(1)

    def row_bytes(self, count: int) -> int:
        """Return a byte for each number, and four for each block."""
        return count + 4 * (count // min(BLOCK, count))


class Recoded(Lossy):
    """Each rank averages a chunk of all ranks' coded values, and sends the chunk's coded mean to all.

    Args:
        codec: The form of the values on the wire.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec

    def mean(self, values: Tensor, shapes: Sequence[torch.Size]) -> Sent:
        """Average the values of all ranks. Collective."""
        ranks, rank, dtype = dist.get_world_size(self.group), dist.get_rank(self.group), values.dtype
        rows = self.codec.rows(values, ranks)
        count = rows.shape[1]
        coded = self.codec.encode(rows)
        error = rows - self.codec.decode(coded, count, dtype)
        received = _send_rows(coded, self.group)
        chunk = self.codec.decode(received, count, dtype).sum(0, keepdim=True) / ranks
        own = self.codec.encode(chunk)
        error[rank] += (chunk - self.codec.decode(own, count, dtype))[0] * ranks
        _gather_rows(coded, own[0], self.group)
        mean = self.codec.decode(coded, count, dtype)
        payload = self.payload(values.numel(), ranks=ranks, itemsize=values.element_size())
        return Sent(mean.view(-1)[: values.numel()], error.view(-1)[: values.numel()], payload)

    def payload(self, count: int, *, ranks: int, itemsize: int) -> int:
        """Return the bytes of all chunks but this rank's own, sent twice."""
        return 2 * (ranks - 1) * self.codec.row_bytes(self.codec.padded(-(-count // ranks)))


class TopK(Lossy):
    """Every rank sends its largest values to all others, with their positions.

    Args:
        density: The share of the values that is sent.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        self.density = density

    def mean(self, values: Tensor, shapes: Sequence[torch.Size]) -> Sent:
        """Average the largest values of each rank. Collective."""
        ranks = dist.get_world_size(self.group)
        where = largest(values.abs(), self._kept(values.numel()))
        chosen = values[where]
        positions = where.new_empty(ranks, where.numel(), dtype=torch.int32)
        numbers = chosen.new_empty(ranks, where.numel())
        _gather_rows(positions, where.to(torch.int32), self.group)
        _gather_rows(numbers, chosen, self.group)
        mean = torch.zeros_like(values).index_add_(0, positions.flatten().long(), numbers.flatten()) / ranks
        error = values.index_fill(0, where, 0.0)
        payload = self.payload(values.numel(), ranks=ranks, itemsize=values.element_size())
        return Sent(mean, error, payload)

    def payload(self, count: int, *, ranks: int, itemsize: int) -> int:
        """Return the bytes of an all-gather of values and of positions of four bytes."""
        return (ranks - 1) * self._kept(count) * (itemsize + 4)

    def _kept(self, count: int) -> int:
        return max(1, int(count * self.density)) if count else 0


_WIRES: dict[str, Callable[[float], Wire]] = {
    "none": lambda density: Exact(),
    "fp16": lambda density: Recoded(Cast(torch.float16)),
    "bf16": lambda density: Recoded(Cast(torch.bfloat16)),
    "int8": lambda density: Recoded(Int8()),
    "topk": TopK,
}


def make_wire(codec: str, density: float, *, group: dist.ProcessGroup | None = None) -> Wire:
    """Return the wire of an option's value.

    Args:
        codec: A name of `nnx_comm.options.Codec`.
        density: The share of the values that ``"topk"`` sends.
        group: The ranks that average their values; None for all.
    """
    wire = _WIRES[codec](density)
    wire.group = group
    return wire


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace values by their sum over the ranks of a group. Collective."""
    _wait(dist.all_reduce(values, group=group, async_op=True))


def swap(message: Tensor, peers: Iterable[int]) -> dict[int, Tensor]:
    """Send a row of bytes to other ranks, and return theirs. Collective for these ranks."""
    received = {peer: torch.empty_like(message) for peer in peers}
    for at in _slices(message):
        sends = [dist.P2POp(dist.isend, message[..., at], peer) for peer in received]
        receives = [dist.P2POp(dist.irecv, theirs[..., at], peer) for peer, theirs in received.items()]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            _wait(work)
    return received


def _send_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows that all ranks have for this rank; each rank gets the row of its number. Collective."""
    received = torch.empty_like(rows)
    for at in _slices(rows):
        mine = rows[:, at].contiguous()
        theirs = torch.empty_like(mine)
        _wait(dist.all_to_all_single(theirs, mine, group=group, async_op=True))
        received[:, at] = theirs
    return received


def _gather_rows(rows: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill each row with that of the rank of its number. Collective."""
    for at in _slices(mine):
        _wait(dist.all_gather([row[at] for row in rows.unbind()], mine[at], group=group, async_op=True))


def _slices(values: Tensor) -> Iterator[slice]:
    """Yield the slices of the last dim that travel one after the other."""
    count = values.shape[-1]
    # Gloo writes a message at once. A long one overruns the queue of a slow link, and TCP waits to send the
    # lost packets again: 2.1 MB took twice as long at 100 Mbit/s. NCCL divides messages itself.
    step = MESSAGE // values.element_size() if values.device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the largest values, in any order.

    A sample shows which values may be among them, so that few have to be compared with each other.

    Args:
        values: Numbers that are not negative, 1-d.
        count: How many to return.
    """
    sample = values[::64]
    enough = 2 * count // 64 + 16
    if enough < len(sample) // 2:
        may_be = torch.nonzero(values >= sample.topk(enough).values[-1]).flatten()
        if len(may_be) >= count:
            return may_be[values[may_be].topk(count, sorted=False).indices]
    return values.topk(count, sorted=False).indices


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    wait_for_collective(work, _DOING)
