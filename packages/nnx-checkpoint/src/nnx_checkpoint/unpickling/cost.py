"""Compute the memory, time and depth that unpickling a file costs, before unpickling it.

A malicious pickle attacks the unpickler in several ways:

- Each byte of it can make an empty list of 64 bytes.
- A tuple that holds a tuple twice, which holds one twice, and so on, is hashed to the end as a key.
- Keys with equal hashes are compared in pairs.
- The hash of a tuple that is nested too deeply crashes the process.
- A tensor without data can claim any number of elements, and is iterated in place of a list or a number.

So this module first follows the operations of a pickle, without making any object.
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
"""The approximate bytes of the object that an operation makes, without its content and its slot."""
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
"""Classes that iterate their arguments; picklers pass them lists, tuples and dicts only."""
_COMPLEX = ("builtins complex", "__builtin__ complex")

_MARK, _PUT, _GET, _TO_MARK = -1, -2, -3, -4
"""Codes for operations that take no fixed number of objects."""


class _Item:
    """An object on the stack.

    Attributes:
        weight: The number of objects that its hash visits.
        depth: Its nesting depth.
        called: True if it is the result of a call that may return a tensor.
        what: A number, a text, the name of a class, a `_Tuple`, or a `_Filled` for a filled container.
    """

    __slots__ = ("called", "depth", "weight", "what")

    def __init__(self, weight: int, depth: int, what: Any = None, *, called: bool = False) -> None:
        self.weight = weight
        self.depth = depth
        self.called = called
        self.what = what

    def hashed(self) -> int | None:
        """Return its hash if it is predictable, else None."""
        if isinstance(self.what, _Tuple):
            return self.what.hashed
        return None if self.what is None or isinstance(self.what, _Filled) else hash(self.what)


class _Filled:
    """The elements of a list, a dict or a set."""

    __slots__ = ("counts", "depth", "hashes", "weight")

    def __init__(self) -> None:
        self.hashes: list[int] = []  # hashes of a list's items: the list may become a set
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
    """An object with exactly this hash (the hash of a 64-bit integer differs from its value)."""

    __slots__ = ("_hash",)

    def __init__(self, value: Any) -> None:
        self._hash = value

    @override
    def __hash__(self) -> int:
        return int(self._hash)


def _effect(operation: pickletools.OpcodeInfo) -> tuple[int, int, int]:
    """Return the bytes of an operation's object, and the numbers of objects that it pops and pushes."""
    before, given = operation.stack_before, len(operation.stack_after)
    taken = len(before)
    if operation.name == "MARK":
        taken = _MARK
    elif operation.name in _PUTS:
        taken = _PUT
    elif operation.name in _GETS:
        taken = _GET
    elif pickletools.markobject in before:  # it takes an object before the mark: the container
        taken, given = _TO_MARK, given * (before[0] is pickletools.markobject)
    return 8 + _MEMORY.get(operation.name, 0), taken, given


_EFFECTS = {operation.name: _effect(operation) for operation in pickletools.opcodes}


def refuse_swollen(file: IO[bytes], *, nbytes: int, source: str) -> None:
    """Refuse a file of ``torch.save`` whose pickle costs far more than its bytes.

    Args:
        file: The file, or its bytes read so far.
        nbytes: The size of the file.
        source: The path of the file, for messages.

    Raises:
        CheckpointError: The objects take more than 48 MB and three times the file; the stack has a million
            objects; a tuple or the keys hold more than a million objects and than the file has bytes; keys
            share one hash or are nested more than a thousand deep; or a tensor may be iterated.
    """
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(5):  # the old format has this many pickles, followed by the elements of tensors
            refuse_swollen_pickle(file, nbytes=nbytes, source=source)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("/data.pkl"):
                refuse_swollen_pickle(io.BytesIO(archive.read(entry)), nbytes=nbytes, source=source)


def refuse_swollen_pickle(pickled: IO[bytes], *, nbytes: int, source: str) -> None:
    """Refuse one pickle that costs far more than its bytes; see `refuse_swollen`."""
    _Following(nbytes, source).follow(pickled)


class _Following:
    """Follows the operations of one pickle, with the arguments of `refuse_swollen`."""

    def __init__(self, nbytes: int, source: str) -> None:
        self._source = source
        self._nbytes = nbytes
        self._most = max(MOST_OBJECTS, nbytes)
        self._looked_at = 0

    def follow(self, pickled: IO[bytes]) -> None:
        """Follow the pickle to its end, or to the first damage (which unpickling reports)."""
        most_memory = 3 * self._nbytes + (48 << 20)
        stack: list[_Item] = []
        below: list[list[_Item]] = []  # the stack below each mark
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
        """Return the object that an operation pushes onto the stack."""
        if name == "BUILD" and items[1].called:
            raise self._refusal("restores an object from a value that is not a dict")
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
                raise self._refusal("calls a class with arguments that are not a tuple")
            self._call(made, items[0].what, items[1].what.items)
        return made

    def _name_storage(self, named: Any) -> None:
        """Refuse a storage unless texts name it and a number gives its elements."""
        values = [item.what for item in named.items] if isinstance(named, _Tuple) else []
        if len(values) != 5 or not isinstance(values[2], str) or type(values[4]) is not int:
            raise self._refusal("names a storage in another form than torch.save does")

    def _call(self, made: _Item, name: Any, arguments: list[_Item]) -> None:
        """Follow the call of a class: sets hash their items, complex numbers have hashes."""
        values = [item.what for item in arguments]
        if name == "_codecs encode":  # makes bytes in old pickles
            made.called = False
        if name in _CONTAINERS:
            made.called = False
            # The first argument of a defaultdict is a function.
            if any(item.called for item in arguments[name == "collections defaultdict" :]):
                raise self._refusal("makes a container from a value that is not a list")
        if name in _SETS and values and isinstance(values[0], _Filled):
            made.what = _Filled()
            self._count(made.what, values[0].hashes, values[0].weight, values[0].depth)
        if name in _COMPLEX and values and all(type(value) in (int, float) for value in values):
            with contextlib.suppress(OverflowError):
                made.what = complex(*values)

    def _fill(self, name: str, container: _Item, items: list[_Item]) -> None:
        """Record the items that go into a list, a set or a dict."""
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
        """Count the visits of hashing and comparing keys."""
        self._looked_at += weight
        if self._looked_at > self._most:
            raise self._refusal("has keys that take too long to hash and compare")
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
