"""Find the values that a forward reads."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, Protocol

from torch import nn

from nnx_core.view.side_effects import is_users_own, names_in, origin_of

_VERSIONED = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "builtins"),
        *("transformers", "nnx_core", "nnx_nnscaler"),
    ]
)
"""Packages whose code is fixed within their version."""


def is_users(module: str) -> bool:
    """Return True if code may change while the versions of torch and Python do not."""
    return module.partition(".")[0] not in _VERSIONED and origin_of(module) != "python"


# A program depends on the values of attributes and globals at the time of the trace: ``if self.warm: ...``
# and ``x * self.hparams.scale`` are decided by tracing. This section finds their names in the code of
# ``forward`` and of its callees. So a new value, or a change inside of it, leads to another program.


_NOTHING = object()


_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}


MOST_VALUES = 10_000


OPAQUE = frozenset([*_VERSIONED, "torchmetrics", "numpy"]) - {"transformers"}
"""Packages whose objects are compared by identity, not by content."""


DEFINITIONS = (type, ModuleType, FunctionType, property, staticmethod, classmethod)


_ENVIRONMENT = frozenset(["environ", "getenv"])


_LOGS = frozenset(["log", "log_dict"])
"""Lightning's methods, whose code is not searched."""


class Space(Protocol):
    """A mapping of names to values: an object's ``__dict__``, a class's, or a module's globals."""

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the value of a name."""


class _Closure:
    """The variables of enclosing functions."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any = None, /) -> Any:
        try:
            return self._cells[name].cell_contents
        except (KeyError, ValueError):  # an unassigned variable
            return default


def read_by_forward(root: nn.Module, *, besides: Collection[str] = ()) -> list[tuple[Space, str]]:
    """Return the space and name of each value that the forward of a module or submodule may read.

    Args:
        root: The module.
        besides: The fully qualified names of submodules that run their own code, for all values.

    Example:
        >>> dropout = nn.Dropout(0.1)
        >>> sorted(name for _, name in read_by_forward(dropout))
        ['inplace', 'p']
    """
    found: dict[tuple[int, str], tuple[Space, str]] = {}
    modules = _looked_through(root, besides)
    names, functions = _reached(modules)
    for module in modules:
        cls: Any = type(module)  # mypy on hashes
        own = vars(module)
        for name in names:
            holder = next((base for base in cls.__mro__ if name in vars(base)), None)
            value = _NOTHING if holder is None else vars(holder)[name]
            if _decides(value) and holder is not None:
                found[id(holder), name] = vars(holder), name
            if _decides(own.get(name, value), is_own=name in own):
                found[id(own), name] = own, name
    found |= {(id(space), name): (space, name) for space, name in _read_outside(functions)}
    return list(found.values())


def code_reached(root: nn.Module) -> tuple[FunctionType, ...]:
    """Return the functions of a module, its submodules and their classes that the forward may call."""
    return _reached(_looked_through(root, ()))[1]


def _looked_through(root: nn.Module, besides: Collection[str]) -> list[nn.Module]:
    return [
        module
        for path, module in root.named_modules()
        if not any(path == other or path.startswith(f"{other}.") for other in besides)
        and package(type(module)) != "torchmetrics"
    ]


def _decides(value: Any, *, is_own: bool = False) -> bool:
    """Return True if a program may depend on a value. Functions of classes are followed instead."""
    if value is _NOTHING or isinstance(value, (nn.Module, nn.Parameter, ModuleType, type)):
        return False
    return is_own or not (isinstance(value, DEFINITIONS) or hasattr(type(value), "__get__"))


def _reached(modules: Sequence[nn.Module]) -> tuple[tuple[str, ...], tuple[FunctionType, ...]]:
    """Return the names in the code that forwards reach on modules, and the functions of this code."""
    held = {
        (name, inspect.unwrap(value))
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
    }
    return _reached_in(frozenset(map(type, modules)), frozenset(held))


@functools.lru_cache(maxsize=64)
def _reached_in(
    classes: frozenset[type], held: frozenset[tuple[str, FunctionType]]
) -> tuple[tuple[str, ...], tuple[FunctionType, ...]]:
    seen = {"forward"}
    functions: dict[FunctionType, None] = {}
    left = ["forward"]
    while left:
        name = left.pop()
        found = [function for other, function in held if other == name]
        found += [function for cls in classes for function in _functions_read(cls, name)]
        for function in found:
            functions[function] = None
            new = names_in(function.__code__) - seen - _LOGS
            seen |= new
            left += new
    return tuple(sorted(seen - _OWN_OF_MODULES)), tuple(functions)


def _functions_read(cls: type, name: str) -> Iterator[FunctionType]:
    """Return the value of a name on a class, and on its bases if a method of the class calls theirs."""
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return
        function = _function_of(vars(base).get(name))
        if function is not None:
            yield function
            if name not in _names_with_bases(cls):
                return


@functools.lru_cache(maxsize=256)
def _names_with_bases(cls: type) -> frozenset[str]:
    """Return the names in the user's methods that name ``super`` or a base, and these methods' names."""
    bases = {base.__name__ for base in cls.__mro__[1:]} | {"super"}
    found: set[str] = set()
    for owner in filter(lambda one: is_users(one.__module__), cls.__mro__):
        for own, member in vars(owner).items():
            function = _function_of(member)
            names = names_in(function.__code__) if function is not None else set()
            if names & bases:
                found |= names | {own}
    return frozenset(found)


def _function_of(member: Any) -> FunctionType | None:
    """Return the function of a method or property."""
    member = member.fget if isinstance(member, property) else member
    member = getattr(member, "__func__", member)
    return inspect.unwrap(member) if isinstance(member, FunctionType) else None


def _read_outside(functions: Iterable[FunctionType]) -> Iterator[tuple[Space, str]]:
    """Return the reads of modules and enclosing functions by the user's functions and their callees."""
    left, seen = list(functions), set()
    while left:
        function = left.pop()
        if function in seen or not is_users_own(function.__module__):
            continue
        seen.add(function)
        spaces: list[Space] = [function.__globals__, _Closure(function)]
        names = sorted(names_in(function.__code__) | set(function.__code__.co_freevars))
        if _ENVIRONMENT & set(names):
            yield vars(os), "environ"
        for space, name in [(space, name) for name in names for space in spaces]:
            value = space.get(name, _NOTHING)
            if isinstance(value, FunctionType):
                left.append(inspect.unwrap(value))
            elif isinstance(value, ModuleType) and is_users_own(value.__name__):
                spaces = [vars(value)]
                held = [(other, vars(value).get(other, _NOTHING)) for other in names]
                left += [inspect.unwrap(one) for _, one in held if isinstance(one, FunctionType)]
                yield from ((vars(value), other) for other, one in held if _decides(one))
            elif _decides(value):
                yield space, name


def package(cls: type) -> str:
    """The top-level package of a class."""
    return cls.__module__.partition(".")[0]
