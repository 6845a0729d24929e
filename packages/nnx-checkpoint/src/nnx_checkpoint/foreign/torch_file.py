"""Files of ``torch.save``: their structure without their data, and without running what they bring along.

Tensors become `FileTensor`, which says where in the file the elements are. Everything else is unpickled by
torch's restricted unpickler, which is told of a few harmless classes more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import io
import math
import pathlib
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from typing_extensions import override

from nnx_checkpoint._torch_compat import STORAGE_DTYPES, load_structure, position_in_file
from nnx_checkpoint.box import Box
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.index import Piece, TensorEntry
from nnx_checkpoint.storage.files import is_file, read_exactly

__all__ = [
    "DescribedTensor",
    "FileTensor",
    "Inert",
    "TorchArchive",
    "describe_tensor",
    "load_torch_file",
    "map_paths",
    "map_tree",
    "mentions",
    "refuse_endless",
    "refuse_swollen",
]


# --- what may be restored without trust -----------------------------------------------------------
# Files of Lightning and of users hold a few harmless types that torch's restricted unpickler does not know:
# paths, argparse's Namespace, numpy's scalars and arrays. Others it refuses to fill even if it is told that
# they are safe, because they are neither a plain dict nor a plain list; for these it makes a plain one,
# which `StandIns` replaces afterwards. Nothing here runs code that a file brings along: each class only
# holds data.


_MOST_OBJECTS = 1_000_000
_MEMORY = {
    "EMPTY_LIST": 64,
    "EMPTY_DICT": 72,
    "EMPTY_SET": 224,
    "MARK": 136,
    "BINFLOAT": 32,
    "BININT": 40,
    "LONG1": 40,
    **dict.fromkeys(("TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "FROZENSET", "REDUCE", "NEWOBJ"), 64),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"), 56),
}
"""Roughly how many bytes an operation of a pickle takes, beside those of what it holds and a place for it."""
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")

_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.utilities.parsing",
    "lightning.pytorch.utilities.parsing",
)
_NUMPY_KINDS = "?bBhHiIlLqQefdgFDGSUMm"


class Inert:
    """Stands in for a class of another program: keeps what it was made of and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:  # noqa: D102 - as of any class
        made = super().__new__(cls)
        made.arguments = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def harmless() -> list[Any]:
    """Classes and functions that only make data out of data, or pairs of one and its pickled name."""
    plain = [argparse.Namespace, frozenset, list, dict, tuple, int, float, str, bytes, bool, slice, range]
    return [*plain, *_paths(), *_numpy()]


def _paths() -> list[tuple[Any, str]]:
    """A path of another system cannot be made here; its pure form can."""
    kinds = {
        "PosixPath": pathlib.PosixPath if pathlib.Path is not pathlib.WindowsPath else pathlib.PurePosixPath,
        "WindowsPath": pathlib.PureWindowsPath,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }
    return [(kind, f"{module}.{name}") for module in _PATHLIB for name, kind in kinds.items()]


_PATHLIB = ("pathlib", "pathlib._local")
"""Python 3.13 names the module that it split off, in what it pickles."""


def _numpy() -> list[Any]:
    scalar: Any = np.float64(0).__reduce__()[0]
    rebuild: Any = np.zeros(0).__reduce__()[0]
    functions = [
        pair
        for core in ("numpy.core.multiarray", "numpy._core.multiarray")
        for pair in ((scalar, f"{core}.scalar"), (rebuild, f"{core}._reconstruct"))
    ]
    return [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _NUMPY_KINDS}, *functions]


def refuse_endless(tree: Any, *, nbytes: int, source: str, records: tuple[type, ...] = ()) -> None:
    """Refuse nested containers with far more in them than the bytes they were read from can hold.

    A list that holds another one twice, which holds the next one twice, and so on, has 2^40 leaves in two
    kilobytes, and whoever walks over it never ends.

    Args:
        tree: The tree that was read.
        nbytes: The number of bytes that it was read from.
        source: Path of the file, for messages.
        records: Further classes, into whose attributes is looked.

    Raises:
        CheckpointError: There are more objects in it than a million and than bytes.
    """
    left, pending = max(_MOST_OBJECTS, nbytes), [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, (list, tuple, collections.deque, set, frozenset)):
            inner = list(value)
        elif isinstance(value, (argparse.Namespace, Inert, *records)):
            inner = list(vars(value).values())
        else:
            continue
        pending += inner
        left -= len(inner)
        if left < 0:
            raise CheckpointError(
                f"'{source}' nests more than {max(_MOST_OBJECTS, nbytes):,} objects in {nbytes:,} bytes.",
                remedy="No training program writes that; use another checkpoint.",
            )


def refuse_swollen(file: IO[bytes], *, nbytes: int, source: str) -> None:
    """Refuse a file of ``torch.save`` whose pickle makes far more objects than the file has bytes.

    A pickle makes an empty list, of 64 bytes, with each of its own bytes, and a tuple that holds one twice,
    which holds one twice, and so on, is looked through to the end when it becomes a key. It is unpickled
    before anybody can look at what it makes. So its operations are counted first.

    Args:
        file: The file, or what was read of it.
        nbytes: Its size.
        source: Its path, for messages.

    Raises:
        CheckpointError: The objects take more than 48 MB and three times the file, a million of them wait to
            be put somewhere, or a tuple holds more than a million and than the file has bytes.
    """
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(5):  # the old format is as many pickles, and the elements of tensors after them
            _Operations(nbytes, source).count(file)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("/data.pkl"):
                _Operations(nbytes, source).count(io.BytesIO(archive.read(entry)))


class _Operations:
    """What a pickle does, as far as sizes go: for every object on the stack how much a hash of it looks at.

    Args:
        nbytes: Size of the file.
        source: Its path, for messages.
    """

    def __init__(self, nbytes: int, source: str) -> None:
        self._nbytes, self._source = nbytes, source
        self._stack: list[int] = []
        self._below: list[list[int]] = []  # what lies below each mark
        self._memo: dict[Any, int] = {}
        self._memory = self._waiting = 0

    def count(self, pickled: IO[bytes]) -> None:
        """Follow one pickle up to its end, or to where it is damaged: who unpickles it says what is wrong."""
        with contextlib.suppress(ValueError, IndexError):
            for operation, argument, _ in pickletools.genops(pickled):
                self._follow(operation, argument)
                self._check(self._stack[-1] if self._stack else 0)

    def _follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        name, before = operation.name, operation.stack_before
        self._memory += (
            8 + _MEMORY.get(name, 0) + (len(argument) if isinstance(argument, (str, bytes)) else 0)
        )
        if name == "MARK":
            self._below.append(self._stack)
            self._stack = []
        elif name in _PUTS:
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif name in _GETS:
            self._push([self._memo.get(argument, 1)])
        elif pickletools.markobject in before:
            taken, self._stack = self._stack, self._below.pop()
            self._memory -= _MEMORY["MARK"]
            self._waiting -= len(taken)
            if before[0] is pickletools.markobject and operation.stack_after:  # else they go into a container
                self._push([sum(taken)])
        else:
            taken = [self._stack.pop() for _ in before]
            self._waiting -= len(taken)
            self._push([sum(taken) or 1 for _ in operation.stack_after])

    def _push(self, weights: list[int]) -> None:
        self._stack += weights
        self._waiting += len(weights)

    def _check(self, weight: int) -> None:
        is_small = self._memory <= 3 * self._nbytes + (48 << 20) and self._waiting <= _MOST_OBJECTS
        if not is_small or weight > max(_MOST_OBJECTS, self._nbytes):
            raise CheckpointError(
                f"the pickle in '{self._source}', a file of {self._nbytes:,} bytes, makes so many objects "
                "that they fill the memory.",
                remedy="No training program writes that; use another checkpoint.",
            )


class StandIns:
    """Plain containers in place of special ones, for one load.

    Args:
        inert: Names of classes of other programs; `Inert` takes the place of each.
    """

    def __init__(self, inert: Sequence[str] = ()) -> None:
        self._made: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._inert = inert

    def classes(self) -> list[tuple[Any, str]]:
        """What takes the place of each class, with the class's pickled name."""
        return [
            *((self._dict_class(module), f"{module}.AttributeDict") for module in _ATTRIBUTE_DICTS),
            (self._defaultdict, "collections.defaultdict"),
            (self._deque, "collections.deque"),
            *((type(name.rpartition(".")[2], (Inert,), {}), name) for name in self._inert),
        ]

    def _dict_class(self, module: str) -> Any:
        def new(cls: type, *args: Any) -> dict[Any, Any]:
            return self._note({}, lambda items: _attribute_dict(module, items))  # type: ignore[no-any-return]

        return type("AttributeDict", (), {"__new__": new})

    def _defaultdict(self, factory: Any = None) -> Any:
        return self._note({}, lambda items: collections.defaultdict(factory, items))

    def _deque(self, items: Sequence[Any] = (), maxlen: int | None = None) -> Any:
        return self._note(list(items), lambda values: collections.deque(values, maxlen))

    def _note(self, made: Any, finish: Callable[[Any], Any]) -> Any:
        self._made[id(made)] = (made, finish)
        return made

    def restore(self, tree: Any) -> Any:
        """The same tree with the real containers."""
        if not self._made:
            return tree
        if isinstance(tree, dict):
            for key, value in tree.items():
                tree[key] = self.restore(value)
        elif isinstance(tree, list):
            tree[:] = [self.restore(value) for value in tree]
        elif type(tree) is tuple:
            return tuple(self.restore(value) for value in tree)
        elif isinstance(tree, Inert):
            tree.arguments, tree.state = self.restore(tree.arguments), self.restore(tree.state)
        _, finish = self._made.get(id(tree), (None, None))
        return tree if finish is None else finish(tree)


def _attribute_dict(module: str, items: dict[Any, Any]) -> dict[Any, Any]:
    """Lightning's class if one of its packages is here, else a plain dict."""
    for candidate in (module, *_ATTRIBUTE_DICTS):
        try:
            made: dict[Any, Any] = importlib.import_module(candidate).AttributeDict()
        except (ImportError, AttributeError):
            continue
        made.update(items)
        return made
    return items


# --- files ----------------------------------------------------------------------------------------


_LARGEST_PICKLE = 256 << 20
_SMALL = 64 << 20
"""Bytes that an expanded tensor, or all records, may take beyond four times their file's."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that is still in its file.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        stride: Its strides, in elements.
        path: The file.
        start: Position of its first element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    path: Path
    start: int

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return self.numel == 0
            expected *= extent
        return True

    @property
    def order(self) -> tuple[int, ...] | None:
        """The order of its dims in which the elements lie without gaps, if there is one."""
        order = tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))
        return order if self.permute(order).is_contiguous else None

    def permute(self, order: Sequence[int]) -> FileTensor:
        """The same elements with the dims in another order."""
        shape, stride = (tuple(extents[dim] for dim in order) for extents in (self.shape, self.stride))
        return FileTensor(shape, self.dtype, stride, self.path, self.start)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Bytes from its first element to its last, with what lies between."""
        if self.numel == 0:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def entry(self, name: str) -> TensorEntry:
        """Describe it for the index; only a contiguous tensor is one piece of its file."""
        nbytes = self.numel * self.dtype.itemsize
        piece = Piece(Box.whole(self.shape), str(self.path), self.start, nbytes)
        return TensorEntry(name, self.shape, str(self.dtype).removeprefix("torch."), (piece,))

    def read(self) -> Tensor:
        """Read it into new memory."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = bytearray(read_exactly(self.path, self.extent, start=self.start))
        return torch.frombuffer(raw, dtype=self.dtype).as_strided(self.shape, self.stride).contiguous()


def load_torch_file(
    path: Path, *, weights_only: bool = True, known: Sequence[Any] = (), inert: Sequence[str] = ()
) -> Any:
    """Read the structure of a file of ``torch.save``.

    Args:
        path: The file.
        weights_only: False unpickles freely and maps the data into memory instead.
        known: Further classes, or pairs of one and its pickled name, that may be restored.
        inert: Prefixes of names of classes that are replaced by `Inert`.

    Returns:
        What was saved; `FileTensor` in place of every tensor (a tensor itself in files of the old format,
        or with ``weights_only=False``).

    Raises:
        CheckpointError: The file is damaged, or names something that is not safe to restore.
    """
    if not is_file(path):
        raise CheckpointError(f"'{path}' is missing.", remedy="Restore it, or use another checkpoint.")
    zipped = zipfile.is_zipfile(path)
    _refuse_truncated(path, zipped=zipped)
    try:
        if zipped:
            _refuse_inflated(path)
        if not weights_only:
            return torch.load(path, map_location="cpu", weights_only=False, mmap=zipped)
        return _load_safely(path, zipped=zipped, known=known, inert=inert)
    except CheckpointError:
        raise
    except Exception as error:  # whatever damage or the pickle makes it raise
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"cannot read '{path}': {type(error).__name__}: {reason}",
            remedy="If it is whole and you trust whoever wrote it, pass `weights_only=False`."
            if weights_only
            else "Restore it from a backup, or use another checkpoint.",
        ) from error


def mentions(path: Path, *words: str) -> bool:
    """Whether all these words stand in the pickle of a file of ``torch.save``, which is not unpickled."""
    if not is_file(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(
                (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")), None
            )
            if pickled is None or pickled.file_size > min(_LARGEST_PICKLE, 4 * path.stat().st_size + _SMALL):
                return False
            raw = archive.read(pickled)
    except Exception:  # a damaged zip file makes `zipfile` raise errors of six kinds; who opens it says which
        return False
    return all(word.encode() in raw for word in words)


def _refuse_truncated(path: Path, *, zipped: bool) -> None:
    """The list of a zip file's contents is its end, so a part of one looks like no zip file at all."""
    if not zipped and read_exactly(path, min(4, path.stat().st_size)) == b"PK\x03\x04":
        raise CheckpointError(
            f"'{path}' is truncated: its end, where a file of torch.save lists its contents, is missing.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )


def _refuse_inflated(path: Path) -> None:
    """Records that are compressed, or share bytes, can hold far more than the file: a zip bomb."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        nbytes = sum(entry.file_size for entry in archive.infolist())
    if nbytes > 4 * size + _SMALL:
        raise CheckpointError(
            f"'{path}' claims to hold {nbytes:,} bytes, and has {size:,}.",
            remedy="torch.save compresses nothing; use another checkpoint, or save it anew.",
        )


def _load_safely(path: Path, *, zipped: bool, known: Sequence[Any], inert: Sequence[str]) -> Any:
    with path.open("rb") as file:
        refuse_swollen(file, nbytes=path.stat().st_size, source=str(path))
    with safe_globals([*harmless(), *known]):
        named = get_unsafe_globals_in_checkpoint(path) if zipped else []
    stand_ins = StandIns([name for name in named if name.startswith(tuple(inert))])
    with safe_globals([*harmless(), *known, *stand_ins.classes()]):
        refused = get_unsafe_globals_in_checkpoint(path) if named else []
        if refused:
            raise _unsafe(path, refused)
        if not (zipped and _is_mappable(path)):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            refuse_endless(loaded, nbytes=path.stat().st_size, source=str(path))
            return stand_ins.restore(loaded)
        structure, places = load_structure(path)
    refuse_endless(structure, nbytes=path.stat().st_size, source=str(path))
    stops = _record_stops(path, places)
    return map_tree(stand_ins.restore(structure), lambda value: _located(value, path, stops))


def _unsafe(path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"'{path}' holds objects that only code of their own can restore: {', '.join(sorted(names))}.",
        remedy="If you trust whoever wrote it, pass `weights_only=False`. Otherwise have it saved without "
        "them (hyperparameters: `self.save_hyperparameters(ignore=[...])`).",
    )


def _is_mappable(path: Path) -> bool:
    """Whether tensors stand in the file as in memory: neither compressed nor of another byte order."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        order = [entry for entry in entries if entry.filename.endswith("/byteorder")]
        expected = sys.byteorder.encode()
        same = all(e.file_size == len(expected) and archive.read(e) == expected for e in order)
        return same and all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _record_stops(path: Path, places: Mapping[str, int]) -> dict[int, int]:
    """For each position where a storage begins, where its record ends.

    Raises:
        CheckpointError: Two records have one name, so that readers may take either.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise CheckpointError(
                f"'{path}' has two records of one name.", remedy="Use another checkpoint; torch writes none."
            )
    length = path.stat().st_size
    return {place: min(place + entries[name].compress_size, length) for name, place in places.items()}


def _located(value: Any, path: Path, stops: Mapping[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if any(stride < 0 for stride in value.stride()):
        raise CheckpointError(
            f"'{path}' claims a tensor with strides {value.stride()}.",
            remedy="torch has no negative ones; use another checkpoint.",
        )
    nbytes, most = value.numel() * value.dtype.itemsize, 4 * path.stat().st_size + _SMALL
    if nbytes > most:
        raise CheckpointError(
            f"'{path}' claims a tensor of shape {tuple(value.shape)}, {nbytes:,} bytes, and is far smaller.",
            remedy="It was expanded before it was saved; save it with `.contiguous()`, or use another file.",
        )
    place = position_in_file(value)
    found = FileTensor(
        tuple(value.shape),
        value.dtype,
        tuple(value.stride()),
        path,
        place + int(value.storage_offset()) * value.dtype.itemsize,
    )
    if found.start + found.extent > stops.get(place, place):
        raise CheckpointError(
            f"'{path}' claims a tensor of shape {found.shape} where its data ends before the tensor does.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return found


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the leaves of nested containers, keeping the containers' types."""
    return map_paths(tree, lambda path, value: change(value))


def map_paths(tree: Any, change: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    """As `map_tree`; `change` is also told the keys and positions that lead to a leaf."""
    if isinstance(tree, dict):
        made = copy.copy(tree)  # an OrderedDict with attributes, a defaultdict and so on stay what they are
        for key, value in tree.items():
            made[key] = map_paths(value, change, (*path, str(key)))
        return made
    if type(tree) is argparse.Namespace:
        return argparse.Namespace(**map_paths(vars(tree), change, path))
    if type(tree) is collections.deque:
        return collections.deque(map_paths(list(tree), change, path), tree.maxlen)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = [map_paths(value, change, (*path, str(i))) for i, value in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Inert):
        tree.arguments = map_paths(tree.arguments, change, path)
        tree.state = map_paths(tree.state, change, path)
        return tree
    return change(path, tree)


def read_tensors(tree: Any) -> Any:
    """The same tree with every `FileTensor` read: for what is small, such as the state of callbacks."""
    return map_tree(tree, lambda value: value.read() if isinstance(value, FileTensor) else value)


# --- zip files that hold one tensor ---------------------------------------------------------------
# Where its elements are, from a few hundred bytes: only the zip's directory and the pickle are read, which
# lie at its two ends. The pickle is read by an unpickler that knows nothing but tensors and calls nothing
# of torch. Positions count from the beginning of the zip, so that it may lie inside another file.


_END = 2048
"""Bytes read at once at each end: what precedes and what follows the elements, usually."""
_LONGEST_PICKLE = 1 << 16
"""A tensor's pickle has some 200 bytes."""
_LONGEST_DIRECTORY = 1 << 16
"""It lists some seven records."""
_LOCAL, _CENTRAL = struct.Struct("<4s22xHH"), struct.Struct("<4s6xH8xIIHHH8xI")
_END_RECORD, _LOCATOR = struct.Struct("<4s6xHII2x"), struct.Struct("<4s4xQ4x")
_END_RECORD_64 = struct.Struct("<4s28xQQQ")
_UNKNOWN = 0xFFFFFFFF


class TorchArchive:
    """The records of a zip file of ``torch.save``, found by reading little more than its ends.

    Args:
        read: Gives the bytes at a position, so many of them.
        length: Length of the file.

    Raises:
        ValueError: It is no such file, or it is damaged.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length = read, length
        self._head: bytes = read(0, min(_END, length))
        size = min(_END, length)
        self._tail: bytes = self._head if size == length else read(length - size, size)
        self._records = self._directory()

    @property
    def byte_order(self) -> bytes:
        """What the record of that name says; empty where there is none, as before torch 2.1."""
        return self.record("byteorder", 16) if "byteorder" in self._records else b""

    def record(self, name: str, longest: int) -> bytes:
        """The bytes of a record."""
        start, size = self.place(name)
        if size > longest:
            raise ValueError(f"record {name} has {size} bytes")
        return self._bytes(start, size)

    def place(self, name: str) -> tuple[int, int]:
        """Position and length of a record's data."""
        if name not in self._records:
            raise ValueError(f"it has no record {name}")
        header, size = self._records[name]
        signature, name_length, extra = _LOCAL.unpack(self._bytes(header, _LOCAL.size))
        start = header + _LOCAL.size + name_length + extra
        if signature != b"PK\x03\x04" or start + size > self._length:
            raise ValueError(f"the header of record {name} is damaged")
        return start, size

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > self._length:
            raise ValueError("it ends too early")
        if start + size <= len(self._head):
            return self._head[start : start + size]
        before = self._length - len(self._tail)
        if start >= before:
            return self._tail[start - before : start - before + size]
        return self._read(start, size)

    def _directory(self) -> dict[str, tuple[int, int]]:
        """For each record, without the archive's name, where its header is and how long its data."""
        end = self._length - _END_RECORD.size
        signature, count, size, start = _END_RECORD.unpack(self._bytes(max(end, 0), _END_RECORD.size))
        if signature != b"PK\x05\x06":
            raise ValueError("it is not a zip file of torch.save, or it is truncated")
        signature, place = _LOCATOR.unpack(self._bytes(end - _LOCATOR.size, _LOCATOR.size))
        if signature == b"PK\x06\x07":
            signature, count, size, start = _END_RECORD_64.unpack(self._bytes(place, _END_RECORD_64.size))
            if signature != b"PK\x06\x06":
                raise ValueError("its directory is damaged")
        if size > _LONGEST_DIRECTORY:
            raise ValueError(f"its directory has {size} bytes")
        directory = self._bytes(start, size)
        records, position = {}, 0
        for _ in range(count):
            name, place, size, position = _entry(directory, position)
            records[name] = (place, size)
        return records


def _entry(directory: bytes, position: int) -> tuple[str, int, int, int]:
    """One entry of a zip's directory: name, position of its header, length, and where the next begins."""
    signature, method, stored, size, name, extra, comment, place = _CENTRAL.unpack_from(directory, position)
    if signature != b"PK\x01\x02" or method != 0 or stored != size:
        raise ValueError("its directory is damaged or names compressed records")
    start = position + _CENTRAL.size
    text = directory[start : start + name].decode()
    more = directory[start + name : start + name + extra]
    if _UNKNOWN in (size, place):
        size, place = _long_fields(more, size, place)
    return text.partition("/")[2], place, size, start + name + extra + comment


def _long_fields(extra: bytes, size: int, place: int) -> tuple[int, int]:
    """What does not fit into 32 bits is in a field with tag 1: length, stored length, position."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            if size == _UNKNOWN:
                size = values.pop(0)
                values.pop(0)
            return size, values.pop(0) if place == _UNKNOWN else place
        position += 4 + length
    raise ValueError("its directory is damaged")


# --- the pickle of a tensor -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as its pickle describes it.

    Attributes:
        storage: Name of the record that has its elements, below ``data/``.
        dtype_name: Its element type, without ``torch.``.
        offset: The number of elements that precede its first one in the record.
        shape: Its shape.
        stride: Its strides, in elements.
        plain: True if the stored elements are its values as they are.
    """

    storage: str
    dtype_name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    plain: bool


def _describe(
    storage: tuple[str, str],
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    *more: Any,
) -> DescribedTensor:
    """Called in place of torch's ``_rebuild_tensor_v2`` and ``_rebuild_tensor_v3``."""
    key, dtype_name = storage
    names = [value for value in more if isinstance(value, str)]
    flags = [value for value in more if isinstance(value, Mapping) and value]
    return DescribedTensor(
        key, names[0] if names else dtype_name, offset, tuple(shape), tuple(stride), not flags
    )


def _first(value: Any, *more: Any) -> Any:
    """Called in place of torch's ``_rebuild_parameter``."""
    return value


class _TensorUnpickler(pickle.Unpickler):
    """Knows how torch pickles tensors, and nothing else."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _describe
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _first
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if module in ("torch", "torch.storage") and (name == "UntypedStorage" or name.islower()):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a plain tensor")

    @override
    def persistent_load(self, pid: Any, /) -> tuple[str, str]:
        _, dtype_name, key, *_ = pid
        return key, dtype_name


def describe_tensor(archive: TorchArchive) -> DescribedTensor:
    """What the pickle says of the tensor.

    Raises:
        ValueError: The file holds something else.
        pickle.UnpicklingError: The same, or it is damaged or malicious.
    """
    described = _TensorUnpickler(archive.record("data.pkl", _LONGEST_PICKLE)).load()
    if not isinstance(described, DescribedTensor):
        raise ValueError(f"it holds a {type(described).__name__} instead of a tensor")
    if archive.byte_order not in (b"", b"little"):
        raise ValueError("its bytes are in big-endian order")
    return described
