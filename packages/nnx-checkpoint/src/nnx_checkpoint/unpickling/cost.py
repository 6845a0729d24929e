"""Compute the cost of unpickling a file before it is unpickled: memory, time, and depth.

A pickle makes an empty list, of 64 bytes, with each of its own bytes. A tuple that holds one twice, which
holds one twice, and so on, is looked through to the end when it becomes a key. Keys of one hash are compared
with each other, every two of them. The hash of a tuple that is nested too deeply ends the process. A tensor
without data, of as many elements as its size says, is iterated where a list or a number is expected. So the
operations of a pickle are followed first, without making anything.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import zipfile
from typing import IO, Any

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.codec import HashCounts

__all__ = ["MOST_OBJECTS", "refuse_swollen", "refuse_swollen_pickle"]

MOST_OBJECTS = 1_000_000
_DEEPEST_KEY = 1_000
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
_PLAIN = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *(
        "GLOBAL",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ),
}
_SETS = ("builtins set", "builtins frozenset", "__builtin__ set", "__builtin__ frozenset")
_CONTAINERS = {
    *_SETS,
    *(
        f"{module} {name}"
        for module in ("builtins", "__builtin__")
        for name in ("bytearray", "dict", "list", "tuple")
    ),
    *(f"collections {name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
    "torch Size",
}
"""Classes that iterate their arguments; no pickler gives them anything but lists, tuples and dicts."""
_COMPLEX = ("builtins complex", "__builtin__ complex")

_MARK, _PUT, _GET, _TO_MARK = -1, -2, -3, -4
"""How many objects an operation takes, where that is not a number."""


class _Item:
    """An object on the stack.

    Attributes:
        weight: How much its hash looks at.
        depth: How deeply it is nested.
        called: True if a call made it that may have made a tensor.
        what: A number, a text, the name of a class, a `_Tuple`, or a `_Filled` once something is in it.
    """

    __slots__ = ("called", "depth", "weight", "what")

    def __init__(self, weight: int, depth: int, what: Any = None, *, called: bool = False) -> None:
        self.weight = weight
        self.depth = depth
        self.called = called
        self.what = what

    def hashed(self) -> int | None:
        """Its hash, where that can be foreseen."""
        if isinstance(self.what, _Tuple):
            return self.what.hashed
        return None if self.what is None or isinstance(self.what, _Filled) else hash(self.what)


class _Filled:
    """The elements of a list, a dict or a set."""

    __slots__ = ("counts", "depth", "hashes", "weight")

    def __init__(self) -> None:
        self.hashes: list[int] = []  # of the items of a list, which may become a set
        self.weight = self.depth = 0
        self.counts = HashCounts()


class _Tuple:
    """A tuple: its hash, and its first items, which may be the arguments of a class."""

    __slots__ = ("hashed", "items")

    def __init__(self, items: list[_Item]) -> None:
        hashes = [item.hashed() for item in items]
        self.hashed = None if None in hashes else hash(tuple(map(_Hash, hashes)))
        self.items = items[:5]


class _Hash:
    """Has a hash, as it is: that of an integer of 64 bits is another."""

    __slots__ = ("_hash",)

    def __init__(self, value: Any) -> None:
        self._hash = value

    @override
    def __hash__(self) -> int:
        return int(self._hash)


def _effect(operation: pickletools.OpcodeInfo) -> tuple[int, int, int]:
    """The bytes that an operation takes, and how many objects it takes from the stack and puts there."""
    before, given = operation.stack_before, len(operation.stack_after)
    taken = len(before)
    if operation.name == "MARK":
        taken = _MARK
    elif operation.name in _PUTS:
        taken = _PUT
    elif operation.name in _GETS:
        taken = _GET
    elif pickletools.markobject in before:  # with something before the mark, it is a container
        taken, given = _TO_MARK, given * (before[0] is pickletools.markobject)
    return 8 + _MEMORY.get(operation.name, 0), taken, given


_EFFECTS = {operation.name: _effect(operation) for operation in pickletools.opcodes}


def refuse_swollen(file: IO[bytes], *, nbytes: int, source: str) -> None:
    """Refuse a file of ``torch.save`` whose pickle costs far more than the file has bytes.

    Args:
        file: The file, or its bytes read so far.
        nbytes: Its size.
        source: Its path, for messages.

    Raises:
        CheckpointError: The objects take more than 48 MB and three times the file, a million of them wait to
            be put somewhere, a tuple holds more than a million and than the file has bytes, keys look at as
            many, have one hash, or are nested more than a thousand deep, or a tensor may be iterated.
    """
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(5):  # the old format is as many pickles, and the elements of tensors after them
            refuse_swollen_pickle(file, nbytes=nbytes, source=source)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("/data.pkl"):
                refuse_swollen_pickle(io.BytesIO(archive.read(entry)), nbytes=nbytes, source=source)


def refuse_swollen_pickle(pickled: IO[bytes], *, nbytes: int, source: str) -> None:
    """As `refuse_swollen`, for one pickle."""
    _Following(nbytes, source).follow(pickled)


class _Following:
    """Follows one pickle; its arguments are those of `refuse_swollen`."""

    def __init__(self, nbytes: int, source: str) -> None:
        self._source = source
        self._nbytes = nbytes
        self._most = max(MOST_OBJECTS, nbytes)
        self._looked_at = 0

    def follow(self, pickled: IO[bytes]) -> None:
        """Follow it to its end, or to the first damage, which unpickling reports."""
        most_memory = 3 * self._nbytes + (48 << 20)
        stack: list[_Item] = []
        below: list[list[_Item]] = []  # what lies below each mark
        memo: dict[Any, _Item] = {}
        memory = waiting = 0
        with contextlib.suppress(ValueError, IndexError):
            for operation, argument, _ in pickletools.genops(pickled):
                cost, taken, given = _EFFECTS[operation.name]
                memory += cost + (len(argument) if isinstance(argument, (str, bytes)) else 0)
                if taken >= 0:
                    items = [stack.pop() for _ in range(taken)][::-1]
                    if given:
                        stack += (self._made(operation.name, argument, items),) * given
                    waiting += given - taken
                elif taken == _MARK:
                    below.append(stack)
                    stack = []
                elif taken == _PUT:
                    memo[len(memo) if argument is None else argument] = stack[-1]
                elif taken == _GET:
                    stack.append(memo.get(argument) or _Item(1, 0))
                    waiting += 1
                else:
                    above, stack = stack, below.pop()
                    memory -= _MEMORY["MARK"]
                    waiting -= len(above)
                    if given:
                        stack.append(self._made(operation.name, argument, above))
                        waiting += 1
                    else:
                        self._fill(operation.name, stack[-1], above)
                if (
                    memory > most_memory
                    or waiting > MOST_OBJECTS
                    or (stack and stack[-1].weight > self._most)
                ):
                    raise self._refusal("makes so many objects that they fill the memory")

    def _made(self, name: str, argument: Any, items: list[_Item]) -> _Item:
        """Return the values that an operation puts onto the stack."""
        if name == "BUILD" and items[1].called:
            raise self._refusal("restores an object from what is no dict")
        if name in ("APPEND", "SETITEM", "BUILD"):
            if name != "BUILD":
                self._fill(name, items[0], items[1:])
            return items[0]
        if name in _PLAIN:
            return _Item(1 + (argument.bit_length() >> 6 if type(argument) is int else 0), 0, argument)
        weight = sum([item.weight for item in items]) or 1
        called = name in ("REDUCE", "NEWOBJ", "BINPERSID")
        made = _Item(weight, 1 + max([item.depth for item in items], default=0), called=called)
        if name.endswith(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")):
            made.what = _Tuple(items)
        elif name == "FROZENSET":
            self._fill("ADDITEMS", made, items)
        elif name == "BINPERSID":
            self._name_storage(items[0].what)
        elif called:
            if not isinstance(items[1].what, _Tuple):
                raise self._refusal("calls a class with what is no tuple")
            self._call(made, items[0].what, items[1].what.items)
        return made

    def _name_storage(self, named: Any) -> None:
        """Make sure that a storage is named by texts, and has a number of elements."""
        values = [item.what for item in named.items] if isinstance(named, _Tuple) else []
        if len(values) != 5 or not isinstance(values[2], str) or type(values[4]) is not int:
            raise self._refusal("names a storage otherwise than torch.save does")

    def _call(self, made: _Item, name: Any, arguments: list[_Item]) -> None:
        """Let a class make something: sets hash what they hold, complex numbers have hashes."""
        values = [item.what for item in arguments]
        if name == "_codecs encode":  # which makes bytes, in old pickles
            made.called = False
        if name in _CONTAINERS:
            made.called = False
            # The first argument of a defaultdict is a function.
            if any(item.called for item in arguments[name == "collections defaultdict" :]):
                raise self._refusal("makes a container of what is no list")
        if name in _SETS and values and isinstance(values[0], _Filled):
            made.what = _Filled()
            self._count(made.what, values[0].hashes, values[0].weight, values[0].depth)
        if name in _COMPLEX and values and all(type(value) in (int, float) for value in values):
            with contextlib.suppress(OverflowError):
                made.what = complex(*values)

    def _fill(self, name: str, container: _Item, items: list[_Item]) -> None:
        """Note what goes into a list, a set or a dict."""
        if container.what is None:
            container.what = _Filled()
        inside = container.what
        if not isinstance(inside, _Filled):
            return
        keys = items[::2] if name in ("SETITEM", "SETITEMS") else items
        hashes = [found for key in keys if (found := key.hashed()) is not None]
        weight, depth = sum([key.weight for key in keys]), max([key.depth for key in keys], default=0)
        if name in ("APPEND", "APPENDS"):
            inside.hashes += hashes
            inside.weight += weight
            inside.depth = max(inside.depth, depth)
        else:
            self._count(inside, hashes, weight, depth)

    def _count(self, inside: _Filled, hashes: list[int], weight: int, depth: int) -> None:
        """Let keys be looked at."""
        self._looked_at += weight
        if self._looked_at > self._most:
            raise self._refusal("has keys that take too long to look at")
        if depth > _DEEPEST_KEY:
            raise self._refusal("has a key that is nested too deeply")
        try:
            for hashed in hashes:
                inside.counts.add(hashed)
        except ValueError as error:
            raise self._refusal(f"is malformed: {error}") from error

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the pickle in '{self._source}', a file of {self._nbytes:,} bytes, {why}.",
            remedy="No training program writes that; use another checkpoint.",
        )
