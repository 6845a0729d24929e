"""Undo the side effects of running user code an additional time: record Python state, then restore it.

An engine that captures the inputs of a step runs that step an additional time, and a tracer does so with a
forward. Without a restore, the code would count, collect or draw twice, and training would silently continue
with other numbers.

The record covers all state that the code can reach: attributes of modules and objects, contents of
containers, variables of enclosing functions, globals that the user's functions name, attributes of the user's
classes, environment variables, iterators, open files, random number generators, and arrays. Code and objects
of torch, Lightning and Python itself are opaque.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import warnings
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from io import IOBase
from operator import eq
from pathlib import Path
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nnx_core._torch_compat import versions_kept
from nnx_core.errors import UnsupportedError

__all__ = [
    "PythonState",
    "IteratorAdvancedError",
    "has_values",
    "is_users_own",
    "names_in",
    "cannot_rewind",
    "origin_of",
]

_OPAQUE = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "numpy"),
        *("nnx_core", "nnx_checkpoint", "nnx_base", "nnx_nnscaler", "nnx_colossalai", "nnx_fsdp", "nnx"),
    ]
)
_NEVER_USERS = _OPAQUE | {"builtins", "transformers"}
_MOST_BYTES = 1 << 26
"""The size above which arrays and tensors are not recorded."""
_MOST_OBJECTS = 1_000_000
_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(1 << 99), "", "\u00e9", b"", bytearray())
_REWOUND = (*(type(iter(one)) for one in _SEQUENCES), type(reversed([])))
"""Iterators that can be rewound. Others of Python cannot, or only without the iterators that they read."""
_HOLDERS = (SimpleNamespace, Namespace)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
# Bookkeeping of nn.Module, and a flag of transformers that belongs to hooks, which are not restored either.
_OF_MODULES = {"training", "_parameters", "_modules", "_non_persistent_buffers_set"} | {
    name for name in vars(nn.Module()) if "hook" in name
}
_OF_MODULES |= {"_buffers", "_output_capturing_hooks_installed", "_trainer", "_fabric"}
# Recurrent layers of torch list their parameters here, too, and update the lists on every exchange.
_SILENT = {"_flat_weights", "_flat_weight_refs"}


_Where = tuple["nn.Module | None", str]
"""The module that a value belongs to, or None, and its name there."""


class IteratorAdvancedError(UnsupportedError):
    """Code that ran an additional time advanced an iterator that cannot be rewound."""


@lru_cache(maxsize=1024)
def origin_of(module: str) -> Literal["python", "installed", "elsewhere"]:
    """Return the origin of a module's file: Python itself, installed packages, or elsewhere.

    Args:
        module: The name of the module.
    """
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if "site-packages" in file:
        return "installed"
    return "python" if Path(file).is_relative_to(sysconfig.get_paths()["stdlib"]) else "elsewhere"


def is_users_own(module: str | None) -> bool:
    """Return True if code is the user's own: neither Python's, nor installed, nor of this project.

    Args:
        module: The name of the module of the code; None if it has none.
    """
    if not module:  # generated code, as of torch.fx
        return False
    top = module.partition(".")[0]
    return top not in _NEVER_USERS and origin_of(module) == "elsewhere"


def has_values(module: str) -> bool:
    """Return True if attributes of a module's classes are recorded: not for torch, Lightning and Python.

    Args:
        module: The name of the module.
    """
    top = module.partition(".")[0]
    return top not in _OPAQUE and top not in sys.stdlib_module_names


def cannot_rewind(value: Any) -> bool:
    """Return True if a value is a Python iterator that cannot be rewound: a generator, ``zip`` and others.

    Args:
        value: Anything.

    Example:
        >>> cannot_rewind(n for n in range(3)), cannot_rewind(iter([1, 2]))
        (True, False)
    """
    kind = type(value)
    is_pythons = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    return is_pythons and not isinstance(value, _REWOUND)


class PythonState:
    """A record of the current state that is reachable from some objects.

    Args:
        *roots: Modules, functions and other objects.
        looks_into: Returns True if attributes of an object are recorded, by the module of its class.

    Attributes:
        tensors: The reachable tensors other than parameters and buffers of modules.

    Example:
        >>> counts = {"steps": 0}
        >>> state = PythonState(counts)
        >>> counts["steps"] = 1
        >>> state.restore(), counts
        ([(None, 'steps')], {'steps': 0})
    """

    def __init__(self, *roots: Any, looks_into: Callable[[str], bool] = has_values) -> None:
        self.tensors: list[Tensor] = []
        self._looks_into = looks_into
        self._seen: dict[int, Any] = {}
        self._notes: list[_Note] = [_Entries(os.environ, (None, ""))]
        self._one_way: list[_Value] = []
        self._globals: set[tuple[int, str]] = set()
        # Breadth first, so that the limit cuts off the objects that are farthest from the model.
        left: deque[tuple[Any, _Where]] = deque()
        left.extend((root, (None, "")) for root in roots)
        while left and len(self._seen) < _MOST_OBJECTS:
            value, where = left.popleft()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                left.extend(self._look_at(value, where))

    def restore(self) -> list[_Where]:
        """Restore the recorded state.

        Returns:
            The changed values: the module that each belongs to, or None, and its name there.
        """
        return [where for note in self._notes for where in note.restore()]

    @contextmanager
    def contents_restored(self, *more: Tensor) -> Iterator[None]:
        """Undo writes into reachable tensors, in a context (unless they are large).

        The version counters of the tensors do not change: compiled programs check them, and only ranks that
        trace would count.

        Args:
            *more: Further tensors, of any size.
        """
        found = [*(tensor for tensor in self.tensors if tensor.nbytes <= _MOST_BYTES), *more]
        found = [tensor for tensor in found if not tensor.is_inference()]
        saved = [(tensor, tensor.detach().clone()) for tensor in found]
        with versions_kept(found):
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, content in saved:
                        tensor.copy_(content)

    @property
    def generators(self) -> list[str]:
        """The names of reachable iterators that cannot be rewound."""
        return [note.where[1] for note in self._one_way]

    def advanced(self) -> list[str]:
        """Return the names of those `generators` that have advanced."""
        return [note.where[1] for note in self._one_way if note.has_changed()]

    def _look_at(self, value: Any, where: _Where) -> Iterator[tuple[Any, _Where]]:
        """Record the state of a value, and yield the values that it refers to."""
        found: Any = None
        if isinstance(value, nn.Module):
            for space in (vars(value), value._buffers):
                self._notes.append(_Entries(space, where, module=value))
            found = [(held, (value, name)) for name, held in vars(value).items() if name not in _OF_MODULES]
            found += [(module, where) for module in value.children()]
            found.append((type(value), where))
        elif isinstance(value, dict):
            self._notes.append(_Entries(value, where))
            several = ((name, held) for name, held in value.items() if not isinstance(held, _ATOMS))
            found = [(held, _inner(where, name)) for name, held in several]
        elif isinstance(value, (list, deque, set)):
            self._notes.append(_items(value, where))
            found = [(held, where) for held in value if not isinstance(held, _ATOMS)]
        elif isinstance(value, (tuple, frozenset)):
            found = [(held, where) for held in value]
        elif isinstance(value, type):
            found = self._of_class(value, where)
        elif isinstance(value, (FunctionType, MethodType, partial, property, staticmethod, classmethod)):
            found = self._of_function(value, where)
        elif isinstance(value, ModuleType):
            if is_users_own(value.__name__):
                found = [(held, (None, name)) for name, held in vars(value).items() if name[:2] != "__"]
                self._notes.append(_Entries(vars(value), where))
        else:
            found = self._of_object(value, where)
        yield from found or ()

    def _of_class(self, cls: type, where: _Where) -> Iterator[tuple[Any, _Where]]:
        for base in cls.__mro__:
            if is_users_own(str(base.__module__)):  # classes of C extensions may have a descriptor there
                self._notes.append(_ClassAttributes(base))
                yield from ((held, (None, name)) for name, held in vars(base).items() if name[:2] != "__")
                yield vars(base).get("__init__"), where

    def _of_function(self, value: Any, where: _Where) -> Iterator[tuple[Any, _Where]]:
        if isinstance(value, partial):
            yield from ((held, where) for held in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, MethodType):
            yield from ((value.__self__, where), (value.__func__, where))
        elif isinstance(value, property):
            yield from ((held, where) for held in (value.fget, value.fset))
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__, where
        elif is_users_own(value.__module__ or ""):
            yield from ((held, where) for held in (*(value.__defaults__ or ()), vars(value)))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._notes.append(_variable(cell, (None, name)))
                yield _content(cell), (None, name)
            space = value.__globals__
            for name in names_in(value.__code__) & space.keys():
                if (id(space), name) not in self._globals:
                    self._globals.add((id(space), name))
                    self._notes.append(_Entries(space, (None, name), only=name))
                    yield space[name], (None, name)

    def _of_object(self, value: Any, where: _Where) -> Iterator[tuple[Any, _Where]]:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors.append(value)
            return
        if isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.dtype != object:
                self._notes.append(_array(value, where))
        elif isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self._notes.append(_Value(where, *_access(value), _same_state))
        elif isinstance(value, IOBase):
            self._notes.append(_file_offset(value, where))
        elif cannot_rewind(value) or (
            hasattr(type(value), "__next__") and hasattr(type(value), "__setstate__")
        ):
            self._notes.append(note := _progress(value, where))
            if cannot_rewind(value):
                self._one_way.append(note)
            frame = getattr(value, "gi_frame", None)
            yield from ((held, where) for held in (frame.f_locals.values() if frame is not None else ()))
        elif isinstance(value, _HOLDERS) or self._looks_into(type(value).__module__):
            yield type(value), where
            if hasattr(value, "__dict__"):
                self._notes.append(_Entries(vars(value), where))
                yield from ((held, _inner(where, name)) for name, held in vars(value).items())


def _inner(where: _Where, name: Any) -> _Where:
    """Return the name of a value in an object or dict: the attribute of the module that refers to it."""
    return where if where[0] is not None else (None, str(name))


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the functions that it defines.

    Args:
        code: The code of a function.
    """
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


class _Note(ABC):
    """A record of one mutable value."""

    def __init__(self, where: _Where) -> None:
        self.where = where

    @abstractmethod
    def restore(self) -> list[_Where]:
        """Restore the value; return the names of changes."""


class _Value(_Note):
    """A record that reads and writes the value by functions.

    Args:
        where: The name of the value.
        read: Returns a copy of the current value.
        write: Writes a result of `read` back.
        same: Compares two results of `read`.
    """

    def __init__(
        self,
        where: _Where,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        same: Callable[[Any, Any], bool] = eq,
    ) -> None:
        super().__init__(where)
        self._read, self._write, self._same = read, write, same
        self._before = read()

    def has_changed(self) -> bool:
        return not self._same(self._read(), self._before)

    def restore(self) -> list[_Where]:
        if not self.has_changed():
            return []
        self._write(self._before)
        return [self.where]


class _Entries(_Note):
    """A record of the entries of a dict: attributes of a module or object, or globals."""

    def __init__(
        self, space: Any, where: _Where, *, module: nn.Module | None = None, only: str | None = None
    ) -> None:
        super().__init__(where)
        self._space = space
        self._module = module
        self._only = only
        self._before = {name: value for name, value in space.items() if self._covers(name)}

    def _set(self, name: Any, value: Any) -> None:
        if value is _NOTHING:
            del self._space[name]
        else:
            self._space[name] = value

    def _covers(self, name: Any) -> bool:
        if self._only is not None:
            return bool(name == self._only)
        return self._module is None or name not in _OF_MODULES

    def restore(self) -> list[_Where]:
        changed = []
        names = self._before if self._only else [*self._space.keys() - self._before.keys(), *self._before]
        for name in filter(self._covers, list(names)):
            before, now = self._before.get(name, _NOTHING), self._space.get(name, _NOTHING)
            if now is before:
                continue
            # Restored even if equal: other records hold the old object. Only a real change is reported.
            self._set(name, before)
            if not _is_equal(now, before) and name not in _SILENT:
                changed.append((self._module, name) if self._module is not None else _inner(self.where, name))
        return changed


class _ClassAttributes(_Entries):
    """A record of the attributes of a class, whose dict is read-only."""

    def __init__(self, cls: type) -> None:
        self._class = cls
        super().__init__(vars(cls), (None, ""))

    def _set(self, name: Any, value: Any) -> None:
        if value is _NOTHING:
            type.__delattr__(self._class, name)
        else:
            type.__setattr__(self._class, name, value)

    def _covers(self, name: Any) -> bool:
        return bool(name[:2] != "__")


def _items(container: Any, where: _Where) -> _Value:
    """Record the items of a list, a deque or a set."""
    is_set = isinstance(container, set)

    def write(before: list[Any]) -> None:
        container.clear()
        (container.update if is_set else container.extend)(before)

    return _Value(where, lambda: list(container), write, _same_members if is_set else _is_equal)


def _same_members(now: list[Any], before: list[Any]) -> bool:
    return set(now) == set(before)


def _variable(cell: CellType, where: _Where) -> _Value:
    """Record a variable of an enclosing function."""

    def write(before: Any) -> None:
        if before is not _NOTHING:
            cell.cell_contents = before

    return _Value(where, partial(_content, cell), write, _is_equal)


def _array(array: Any, where: _Where) -> _Value:
    """Record the elements of an array."""
    return _Value(where, array.copy, partial(array.__setitem__, ...), _same_bytes)


def _same_bytes(now: Any, before: Any) -> bool:
    return bool(now.tobytes() == before.tobytes())


def _same_state(now: Any, before: Any) -> bool:
    """Compare two states of a random number generator."""
    return repr(_with_full_repr(now)) == repr(_with_full_repr(before))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return the getter and the setter of a random number generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


def _progress(iterator: Any, where: _Where) -> _Value:
    """Record the position of an iterator; one that cannot be rewound is only compared."""
    state = () if cannot_rewind(iterator) else iterator.__reduce__()[2:]

    def write(_: Any) -> None:
        if state:
            iterator.__setstate__(state[0])

    return _Value(where, partial(_position, iterator), write)


def _position(iterator: Any) -> Any:
    """Return a value that changes when an iterator, or one that it reads from, advances."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, [_identity(v) for v in frame.f_locals.values()])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools warns from Python 3.12 on
            _, *state = iterator.__reduce__()
    except TypeError:  # it reads from a generator, or this is Python 3.14
        return repr(iterator)
    inner = [one for entry in state for one in (entry if isinstance(entry, tuple) else (entry,))]
    return [_position(one) if hasattr(type(one), "__next__") else _identity(one) for one in inner]


def _identity(value: Any) -> Any:
    """Return a value that identifies another; for a list its length, as ``__reduce__`` may copy the rest."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, (*_ATOMS, range)) else id(value)


def _file_offset(file: Any, where: _Where) -> _Value:
    """Record the offset of an open file."""

    def read() -> int | None:
        try:
            return int(file.tell())
        except (OSError, ValueError):  # a pipe, or closed
            return None

    def write(before: int | None) -> None:
        if before is not None:
            file.seek(before)

    return _Value(where, read, write)


_NOTHING: Any = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _NOTHING


def _is_equal(now: Any, before: Any) -> bool:
    """Return True if two values are equal; torch makes new containers with the same content."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(before, (tuple, list, deque)):
        return len(now) == len(before) and all(map(_is_equal, now, before))
    return isinstance(before, (*_ATOMS, torch.Size, slice)) and bool(now == before)


def _with_full_repr(state: Any) -> Any:
    """Convert a state so that its `repr` is complete."""
    if isinstance(state, Mapping):
        return {name: _with_full_repr(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_with_full_repr, state))
    if isinstance(state, Tensor):
        return state.tolist()
    return state.tolist() if isinstance(state, np.ndarray) else state
