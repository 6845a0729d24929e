"""Compare names, shapes, element types, objects and values of two checkpoints of any format.

Values are read slab by slab from both sides at once, so memory is bounded for any size. Differences are
returned, not raised.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nnx_checkpoint.format.codec import EnumName
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import read_in_order

__all__ = ["Comparison", "TensorDifference", "compare"]

_TEXT = 80
"""The most characters shown of a value."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor whose values differ.

    Attributes:
        name: The name of the tensor.
        elements: The number of elements that differ in any bit.
        numel: The number of all elements.
        largest: The largest absolute difference; NaN if only one side is NaN; 0 if only the bits differ, as
            between 0.0 and -0.0.
    """

    name: str
    elements: int
    numel: int
    largest: float


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """An entry of the objects with different values on the two sides.

    Attributes:
        place: The path of the entry, such as ``optim.0.groups.0.lr``.
        left: The first side's value as text; empty if it has none.
        right: The second side's value as text; empty if it has none.
    """

    place: str
    left: str
    right: str


@dataclass
class Comparison:
    """The differences between two checkpoints.

    Attributes:
        only_left: Names in the first checkpoint only.
        only_right: Names in the second checkpoint only.
        shapes: Name, and both shapes, where these differ.
        dtypes: Name, and both element types, where these differ.
        ties: Names that share their tensor with another name on one side only.
        objects: Differences between the objects, of all ranks.
        values: Tensors with different values.
        compared: The number of tensors that were compared by value.
        bytes_compared: Their bytes.
    """

    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    dtypes: list[tuple[str, str, str]] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    objects: list[ObjectDifference] = field(default_factory=list)
    values: list[TensorDifference] = field(default_factory=list)
    compared: int = 0
    bytes_compared: int = 0

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return not (
            self.only_left
            or self.only_right
            or self.shapes
            or self.dtypes
            or self.ties
            or self.objects
            or self.values
        )


def compare(
    left: Checkpoint,
    right: Checkpoint,
    *,
    values: bool = True,
    only_weights: bool = False,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Compare two open checkpoints.

    Formats, paths and provenance are ignored. If only one side names the parameters of an optimizer, a number
    on the other side matches the name at the same position.

    Args:
        left: The first checkpoint.
        right: The second checkpoint.
        values: True also reads and compares the values of tensors.
        only_weights: True compares parameters and buffers only.
        progress: Function of the bytes of each side compared so far, and their total.

    Raises:
        CheckpointError: One of the checkpoints cannot be read.
    """
    found = Comparison()
    a, b = _Side(left), _Side(right)
    a.take_names(b)
    b.take_names(a)
    pairs = _compare_names(a, b, found, prefix="model." if only_weights else "")
    if not only_weights:
        pairs += _compare_objects(a, b, found)
    if values:
        for distinct in _rounds(pairs):
            _compare_values(a, b, distinct, found, progress)
    return found


class _Side:
    """One of the checkpoints: its names and objects, under the names of the other side."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.objects = _without_empty(checkpoint.tree(None, _Reference))
        self._renamed: dict[tuple[str, str], str] = {}

    @property
    def optimizers(self) -> list[Any]:
        """The groups and values of each optimizer; empty if the user saved another object under that name."""
        described = self.objects.get("optim") if isinstance(self.objects, dict) else None
        if isinstance(described, list) and all(_is_optimizer(optimizer) for optimizer in described):
            return list(described)
        return []

    def take_names(self, other: _Side) -> None:
        """Replace parameter numbers by the other side's names."""
        for index, (mine, theirs) in enumerate(zip(self.optimizers, other.optimizers, strict=False)):
            numbers, names = _parameters(mine), _parameters(theirs)
            numbered = all(isinstance(n, int) for n in numbers)
            if numbered and len(numbers) == len(names) and not any(isinstance(n, int) for n in names):
                by_number = dict(zip(numbers, names, strict=True))
                self._renamed |= {(str(index), str(n)): str(name) for n, name in by_number.items()}
                self.objects = {**self.objects, "optim": list(self.optimizers)}
                self.objects["optim"][index] = _with_names(mine, by_number)

    def names(self, prefix: str) -> dict[str, str]:
        """Return every name of the model and the optimizers, mapped to the name in the checkpoint.

        Tensors inside objects are compared with the objects, because formats name them differently.
        """
        return {
            self._rename(name): name
            for name in (*self.checkpoint.tensors, *self.checkpoint.aliases)
            if name.startswith(prefix) and not name.startswith(("objects.", "rank."))
        }

    def _rename(self, name: str) -> str:
        if not (self._renamed and name.startswith("optim.")):
            return name
        index, _, rest = name.removeprefix("optim.").partition(".state.")
        parameter, _, state = rest.rpartition(".")
        return f"optim.{index}.state.{self._renamed.get((index, parameter), parameter)}.{state}"


def _without_empty(objects: Any) -> Any:
    """Return objects without empty entries, which only some formats store."""
    return {k: v for k, v in objects.items() if v not in ({}, [])} if isinstance(objects, dict) else objects


@dataclass(frozen=True, slots=True)
class _Reference:
    """A reference to a tensor inside objects."""

    name: str

    def __repr__(self) -> str:
        return f"tensor {self.name}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two stored tensors of one shape and element type, and their names."""

    name: str
    left: str
    right: str


def _is_optimizer(described: Any) -> bool:
    if not (isinstance(described, Mapping) and isinstance(described.get("values"), Mapping)):
        return False
    groups = described.get("groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )


def _parameters(optimizer: Mapping[str, Any]) -> list[Any]:
    return [parameter for group in optimizer["groups"] for parameter in group["params"]]


def _with_names(optimizer: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        **optimizer,
        "groups": [{**g, "params": [names[n] for n in g["params"]]} for g in optimizer["groups"]],
        "values": {names.get(n, n): values for n, values in optimizer["values"].items()},
    }


def _compare_names(a: _Side, b: _Side, found: Comparison, *, prefix: str) -> list[_Pair]:
    """Compare names and descriptions; return the pairs of tensors to compare by value."""
    mine, theirs = a.names(prefix), b.names(prefix)
    found.only_left = sorted(name for name in mine if name not in theirs)
    found.only_right = sorted(name for name in theirs if name not in mine)
    pairs = []
    for name in mine:
        if name in theirs:
            if _tied(a.checkpoint, mine[name]) != _tied(b.checkpoint, theirs[name]):
                found.ties.append(name)
            pairs += _compare_entries(name, a, mine[name], b, theirs[name], found)
    return pairs


def _tied(checkpoint: Checkpoint, name: str) -> bool:
    """Return True if a tensor has several names."""
    stored = checkpoint.aliases.get(name, name)
    return name in checkpoint.aliases or stored in checkpoint.aliases.values()


def _compare_entries(place: str, a: _Side, x: str, b: _Side, y: str, found: Comparison) -> list[_Pair]:
    left, right = a.checkpoint.entry(x), b.checkpoint.entry(y)
    if left.shape != right.shape:
        found.shapes.append((place, tuple(left.shape), tuple(right.shape)))
    if left.dtype_name != right.dtype_name:
        found.dtypes.append((place, left.dtype_name, right.dtype_name))
    if left.shape != right.shape or left.dtype_name != right.dtype_name:
        return []
    return [_Pair(place, left.name, right.name)]


def _compare_objects(a: _Side, b: _Side, found: Comparison) -> list[_Pair]:
    """Compare the objects; return the pairs of tensors in them."""
    walk = _Walk(a, b, found)
    walk.visit("", a.objects, b.objects)
    for rank in sorted({*a.checkpoint.own_ranks, *b.checkpoint.own_ranks}):
        mine, theirs = (side.checkpoint.tree(rank, _Reference) for side in (a, b))
        walk.visit(f"rank.{rank}", mine, theirs)
    return walk.pairs


class _Walk:
    """A simultaneous walk through two trees."""

    def __init__(self, a: _Side, b: _Side, found: Comparison) -> None:
        self.pairs: list[_Pair] = []
        self._a, self._b, self._found = a, b, found

    def visit(self, place: str, x: Any, y: Any) -> None:
        if isinstance(x, _Reference) and isinstance(y, _Reference):
            name = f"objects.{place}" if not place.startswith("rank.") else place
            self.pairs += _compare_entries(name, self._a, x.name, self._b, y.name, self._found)
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            for key in dict.fromkeys((*x, *y)):
                self.visit(_below(place, key), x.get(key, _NOTHING), y.get(key, _NOTHING))
        elif type(x) is type(y) and isinstance(x, (list, tuple)) and len(x) == len(y):
            for number, (left, right) in enumerate(zip(x, y, strict=True)):
                self.visit(_below(place, number), left, right)
        elif not _equal(x, y):
            self._found.objects.append(ObjectDifference(place, _text(x), _text(y)))


class _Nothing:
    def __repr__(self) -> str:
        return ""


_NOTHING = _Nothing()


def _below(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        same = type(x) is type(y) and x.dtype == y.dtype and x.shape == y.shape
        return same and x.tobytes() == y.tobytes()
    x, y = _enum_name(x), _enum_name(y)
    if isinstance(x, bool) != isinstance(y, bool):
        return False
    if isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y):
        return True
    return bool(x == y)


def _enum_name(value: Any) -> Any:
    """Return an `EnumName` for an enum's member, so that it equals one whose module is not imported."""
    if isinstance(value, enum.Enum):
        return EnumName(f"{type(value).__module__}:{type(value).__qualname__}", value.name)
    return value


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def _rounds(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Yield lists of pairs, each with every stored tensor at most once; skip tied names already compared."""
    rounds: list[list[_Pair]] = []
    used: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for pair in {(pair.left, pair.right): pair for pair in reversed(pairs)}.values():
        number = max(used[0].get(pair.left, 0), used[1].get(pair.right, 0))
        used[0][pair.left] = used[1][pair.right] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(pair)
    yield from rounds


def _compare_values(
    a: _Side, b: _Side, pairs: Sequence[_Pair], found: Comparison, progress: Progress
) -> None:
    lefts = read_in_order(a.checkpoint, [pair.left for pair in pairs], progress=progress)
    rights = read_in_order(b.checkpoint, [pair.right for pair in pairs])
    pair_of = {pair.left: pair for pair in pairs}
    counts: dict[str, Difference] = {}
    # Both sides yield slices of equal bounds, which depend on shapes and element types only.
    for left, right in zip(lefts, rights, strict=True):
        dtype = a.checkpoint.entry(left.name).dtype
        difference = difference_of(left.data, right.data, dtype)
        if difference:
            counts[left.name] = counts.get(left.name, NO_DIFFERENCE) + difference
        found.bytes_compared += len(left.data)
    found.compared += len(pairs)
    for name, total in counts.items():
        numel = a.checkpoint.entry(name).numel
        found.values.append(TensorDifference(pair_of[name].name, total.elements, numel, total.largest))
    found.values.sort(key=lambda difference: difference.name)


# Compute the difference of tensor data: elements that differ in any bit, and the largest distance.


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two slices of data.

    Attributes:
        elements: The number of elements that differ in any bit.
        largest: The largest absolute difference; NaN if only one side is NaN; 0 if only the bits differ, as
            between 0.0 and -0.0.
    """

    elements: int
    largest: float

    def __bool__(self) -> bool:
        return self.elements > 0

    def __add__(self, other: Difference) -> Difference:
        not_a_number = math.isnan(self.largest) or math.isnan(other.largest)
        largest = math.nan if not_a_number else max(self.largest, other.largest)
        return Difference(self.elements + other.elements, largest)


NO_DIFFERENCE = Difference(0, 0.0)


def difference_of(left: memoryview, right: memoryview, dtype: torch.dtype) -> Difference:
    """Return the difference of two slices of the same length.

    Example:
        >>> data = [memoryview(torch.tensor([1, values]).numpy()).cast("B") for values in (2, 5)]
        >>> difference_of(*data, torch.int64)
        Difference(elements=1, largest=3.0)
    """
    word = min(dtype.itemsize, 8)
    a, b = (np.frombuffer(data, f"u{word}").reshape(-1, dtype.itemsize // word) for data in (left, right))
    if np.array_equal(a, b):
        return NO_DIFFERENCE
    rows = np.flatnonzero((a != b).any(axis=1))
    x, y = (_tensor(bits[rows], dtype) for bits in (a, b))
    if dtype.is_complex or dtype.is_floating_point:
        return Difference(len(rows), _distance(x, y, torch.complex128 if dtype.is_complex else torch.float64))
    return Difference(len(rows), _integer_distance(x, y))


def _tensor(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits.reshape(-1)).view(dtype)


def _distance(x: Tensor, y: Tensor, wide: torch.dtype) -> float:
    x, y = x.to(wide), y.to(wide)
    # Equal values with different bits (infinities, two kinds of NaN) would give NaN or 0: exclude them.
    same = (x == y) | (x.isnan() & y.isnan())
    distances = (x - y).abs()[~same]
    return float(distances.max()) if distances.numel() else 0.0


def _integer_distance(x: Tensor, y: Tensor) -> float:
    a, b = (_integers(tensor) for tensor in (x, y))
    # Modulo 2**64 this is exact even where the difference does not fit into 63 bits.
    distances = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return float(distances.max())


def _integers(tensor: Tensor) -> np.ndarray[Any, Any]:
    values = tensor.numpy()
    return values if values.dtype == np.uint64 else values.astype(np.int64)
