"""The state of Python around a model: noted before its code is run once more, and put back afterwards.

An engine that looks at what a step calls the model with begins that step once more, and a tracer runs a
forward once more. What such code counts, collects or draws must not be counted, collected or drawn twice:
training would go on with other numbers, without a word.

Looked at is what the code can reach: attributes of modules and of objects, what is in containers, variables
of enclosing functions, globals that the user's functions name, attributes of the user's classes, environment
variables, iterators, open files, generators of random numbers, and arrays. Code and objects of torch, of
Lightning and of Python itself are not looked into.
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
    "WentOnError",
    "has_values",
    "is_users_own",
    "names_in",
    "only_goes_on",
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
"""Arrays and tensors that are larger are not looked at."""
_MOST_OBJECTS = 1_000_000
_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(1 << 99), "", "\u00e9", b"", bytearray())
_REWOUND = (*(type(iter(one)) for one in _SEQUENCES), type(reversed([])))
"""Iterators that can be put back. Others of Python are not, or without those that they take from."""
_HOLDERS = (SimpleNamespace, Namespace)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
# Bookkeeping of nn.Module, and a flag of transformers that goes with hooks which are not put back either.
_OF_MODULES = {"training", "_parameters", "_modules", "_non_persistent_buffers_set"} | {
    name for name in vars(nn.Module()) if "hook" in name
}
_OF_MODULES |= {"_buffers", "_output_capturing_hooks_installed", "_trainer", "_fabric"}
# Recurrent layers of torch keep their parameters in lists too, which follow every exchange of parameters.
_SILENT = {"_flat_weights", "_flat_weight_refs"}


_Where = tuple["nn.Module | None", str]
"""The module that something belongs to, None if to none, and its name there."""


class WentOnError(UnsupportedError):
    """Code that was run once more went on with an iterator that cannot be put back."""


@lru_cache(maxsize=1024)
def origin_of(module: str) -> Literal["python", "installed", "elsewhere"]:
    """Where the file of a module lies: with Python's own, with installed packages, or elsewhere.

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
        module: The name of the module that it is in; None where it has none.
    """
    if not module:  # of code that was generated, as by torch.fx
        return False
    top = module.partition(".")[0]
    return top not in _NEVER_USERS and origin_of(module) == "elsewhere"


def has_values(module: str) -> bool:
    """Return True if objects of a module's classes are looked into: not those of torch, Lightning and Python.

    Args:
        module: The name of the module.
    """
    top = module.partition(".")[0]
    return top not in _OPAQUE and top not in sys.stdlib_module_names


def only_goes_on(value: Any) -> bool:
    """Whether a value is an iterator of Python that cannot be put back: a generator, ``zip`` and others.

    Args:
        value: Anything.

    Example:
        >>> only_goes_on(n for n in range(3)), only_goes_on(iter([1, 2]))
        (True, False)
    """
    kind = type(value)
    is_pythons = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    return is_pythons and not isinstance(value, _REWOUND)


class PythonState:
    """What is reachable, as it is now.

    Args:
        *roots: Modules, functions and other objects.
        looks_into: Decides by the module of its class whether an object's attributes are looked at.

    Attributes:
        tensors: The tensors that were found and are no parameters or buffers of modules.

    Example:
        >>> counts = {"steps": 0}
        >>> state = PythonState(counts)
        >>> counts["steps"] = 1
        >>> state.put_back(), counts
        ([(None, 'steps')], {'steps': 0})
    """

    def __init__(self, *roots: Any, looks_into: Callable[[str], bool] = has_values) -> None:
        self.tensors: list[Tensor] = []
        self._looks_into = looks_into
        self._seen: dict[int, Any] = {}
        self._notes: list[_Note] = [_Entries(os.environ, (None, ""))]
        self._only_go_on: list[_Value] = []
        self._globals: set[tuple[int, str]] = set()
        left: deque[tuple[Any, _Where]] = deque()
        left.extend((root, (None, "")) for root in roots)
        while left and len(self._seen) < _MOST_OBJECTS:
            value, where = left.popleft()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                left.extend(self._look_at(value, where))

    def put_back(self) -> list[_Where]:
        """Put everything back.

        Returns:
            What had changed: the module that it belongs to, None if to none, and its name there.
        """
        return [where for note in self._notes for where in note.put_back()]

    @contextmanager
    def contents_restored(self, *more: Tensor) -> Iterator[None]:
        """Put back what is written into tensors within it: into those that were found, unless they are large.

        Torch's counts of writes stay as they are: programs go by them, and only ranks that trace would count.

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
        """Names of the iterators that were found and only go on."""
        return [note.where[1] for note in self._only_go_on]

    def lost(self) -> list[str]:
        """Names of those that went on."""
        return [note.where[1] for note in self._only_go_on if note.has_changed()]

    def _look_at(self, value: Any, where: _Where) -> Iterator[tuple[Any, _Where]]:
        """Note what may change in a value, and yield what it leads to."""
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
            if is_users_own(str(base.__module__)):  # classes made in C may have a descriptor there
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
            self._notes.append(_place_in_file(value, where))
        elif only_goes_on(value) or (
            hasattr(type(value), "__next__") and hasattr(type(value), "__setstate__")
        ):
            self._notes.append(note := _progress(value, where))
            if only_goes_on(value):
                self._only_go_on.append(note)
            frame = getattr(value, "gi_frame", None)
            yield from ((held, where) for held in (frame.f_locals.values() if frame is not None else ()))
        elif isinstance(value, _HOLDERS) or self._looks_into(type(value).__module__):
            yield type(value), where
            if hasattr(value, "__dict__"):
                self._notes.append(_Entries(vars(value), where))
                yield from ((held, _inner(where, name)) for name, held in vars(value).items())


def _inner(where: _Where, name: Any) -> _Where:
    """Where something in an object or a dictionary is: by the attribute of a module that leads to it."""
    return where if where[0] is not None else (None, str(name))


def names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, and the functions within it.

    Args:
        code: The code of a function.
    """
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


class _Note(ABC):
    """What may change, as it was."""

    def __init__(self, where: _Where) -> None:
        self.where = where

    @abstractmethod
    def put_back(self) -> list[_Where]:
        """Put it back, and name what had changed."""


class _Value(_Note):
    """One thing that may change.

    Args:
        where: Where it is.
        read: Returns it as it is now, in a copy that later changes leave alone.
        write: Makes it what `read` returned.
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

    def put_back(self) -> list[_Where]:
        if not self.has_changed():
            return []
        self._write(self._before)
        return [self.where]


class _Entries(_Note):
    """What names stand for in a dictionary: a module's or object's attributes, or globals."""

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

    def put_back(self) -> list[_Where]:
        changed = []
        names = self._before if self._only else [*self._space.keys() - self._before.keys(), *self._before]
        for name in filter(self._covers, list(names)):
            before, now = self._before.get(name, _NOTHING), self._space.get(name, _NOTHING)
            if now is before:
                continue
            self._set(name, before)
            if not _means_the_same(now, before) and name not in _SILENT:
                changed.append((self._module, name) if self._module is not None else _inner(self.where, name))
        return changed


class _ClassAttributes(_Entries):
    """What names stand for in a class, whose dictionary can be read only."""

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
    """Note what is in a list, a deque or a set."""
    is_set = isinstance(container, set)

    def write(before: list[Any]) -> None:
        container.clear()
        (container.update if is_set else container.extend)(before)

    return _Value(where, lambda: list(container), write, _same_members if is_set else _means_the_same)


def _same_members(now: list[Any], before: list[Any]) -> bool:
    return set(now) == set(before)


def _variable(cell: CellType, where: _Where) -> _Value:
    """Note a variable of an enclosing function."""

    def write(before: Any) -> None:
        if before is not _NOTHING:
            cell.cell_contents = before

    return _Value(where, partial(_content, cell), write, _means_the_same)


def _array(array: Any, where: _Where) -> _Value:
    """Note the elements of an array."""
    return _Value(where, array.copy, partial(array.__setitem__, ...), _same_bytes)


def _same_bytes(now: Any, before: Any) -> bool:
    return bool(now.tobytes() == before.tobytes())


def _same_state(now: Any, before: Any) -> bool:
    """Compare two states of a generator of random numbers."""
    return repr(_exactly(now)) == repr(_exactly(before))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What gets a generator's state, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


def _progress(iterator: Any, where: _Where) -> _Value:
    """Note how far an iterator has come; one that only goes on is not put back."""
    state = () if only_goes_on(iterator) else iterator.__reduce__()[2:]

    def write(_: Any) -> None:
        if state:
            iterator.__setstate__(state[0])

    return _Value(where, partial(_position, iterator), write)


def _position(iterator: Any) -> Any:
    """What tells how far an iterator has come, and those that it takes from."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, [_told_apart(v) for v in frame.f_locals.values()])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12 on
            _, *parts = iterator.__reduce__()
    except TypeError:  # a generator within, or Python 3.14
        return repr(iterator)
    inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    return [_position(one) if hasattr(type(one), "__next__") else _told_apart(one) for one in inner]


def _told_apart(value: Any) -> Any:
    """What tells a value from others; of a list, which may be made anew of what is left, how long it is."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, (*_ATOMS, range)) else id(value)


def _place_in_file(file: Any, where: _Where) -> _Value:
    """Note where reading a file has come to."""

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


def _means_the_same(now: Any, before: Any) -> bool:
    """Return True if two values mean the same; torch makes new containers of the same content."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(before, (tuple, list, deque)):
        return len(now) == len(before) and all(map(_means_the_same, now, before))
    return isinstance(before, (*_ATOMS, torch.Size, slice)) and bool(now == before)


def _exactly(state: Any) -> Any:
    """A state as something whose text has all of it."""
    if isinstance(state, Mapping):
        return {name: _exactly(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_exactly, state))
    if isinstance(state, Tensor):
        return state.tolist()
    return state.tolist() if isinstance(state, np.ndarray) else state
