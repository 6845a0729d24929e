"""Fingerprint the facts that a stored program depends on: code, structure, shapes, and values read."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy
import xxhash
from torch import Tensor, nn

from nnx_base.dtypes import as_bytes
from nnx_core._torch_compat import pytree
from nnx_core.view.side_effects import names_in
from nnx_nnscaler.trace.reads import (
    DEFINITIONS,
    MOST_VALUES,
    OPAQUE,
    _decides,
    is_users,
    package,
    read_by_forward,
)
from nnx_nnscaler.trace.structure import is_constant

# A fingerprint is a short text that is equal if and only if the traces would be equal. It covers code,
# structure and shapes, but no values. Ranks compare it before they compile, and stored programs are found by
# it.


_DEPTH = 6
# The attributes of these classes determine their behavior: their code is fixed within a version.
_LIBRARIES = ("torch.nn.modules.", "transformers.")
_BASES = ("torch.nn.modules.module", "torch.nn.modules.container")


def fingerprint(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, deep: bool = True
) -> str:
    """Return a hash of a module's code and structure, and of the form of its inputs.

    It covers these facts of every submodule: its class, the code of the class and of user functions that it
    calls, the attributes and globals that this code names, and the training flag. It also covers name, shape,
    dtype and `requires_grad` of parameters and buffers, but not their values.

    Args:
        module: The root.
        args: The positional arguments of the forward.
        kwargs: The keyword arguments of the forward.
        deep: False to omit the content of objects and containers, such as a per-rank seed.

    Example:
        >>> import torch
        >>> one, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> fingerprint(one, (torch.zeros(3, 4),)) == fingerprint(other, (torch.ones(3, 4),))
        True
        >>> fingerprint(one, (torch.zeros(3, 4),)) == fingerprint(other, (torch.ones(5, 4),))
        False
    """
    digest = hashlib.sha256()
    read = [(name, _plain(space.get(name))) for space, name in read_by_forward(module) if deep]
    for part in (*_of_modules(module, deep=deep), *read, *_of_inputs(args, kwargs or {})):
        digest.update(repr(part).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _of_modules(root: nn.Module, *, deep: bool) -> Iterator[Any]:
    known: dict[int, str] = {}
    classes: dict[type, tuple[str, frozenset[str] | None]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        cls = type(module)
        if cls not in classes:
            classes[cls] = _of_class(cls)
        code, names = classes[cls]
        yield name, cls.__module__, cls.__qualname__, module.training, code
        yield _attributes(module, names, deep=deep)
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    first = known.setdefault(id(tensor), f"{name}.{key}")
                    yield first, key, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
        patched = vars(module).get("forward")
        if isinstance(patched, FunctionType):
            yield _of_function(patched, ())


def _of_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    yield str(spec)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad
        else:
            yield leaf if is_constant(leaf) else type(leaf).__qualname__


def _attributes(module: nn.Module, names: frozenset[str] | None, *, deep: bool) -> list[tuple[str, str]]:
    """Return the attributes that the class's code names, or all public ones if its names are unknown."""
    found = []
    for key, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if key != "training" and (key in names if names is not None else not key.startswith("_")):
            text = _plain(value) if deep or is_constant(value) else ""
            if text:
                found.append((key, text))
    return found


def _plain(value: Any) -> str:
    """Return a text of a value's content; None if it is no value."""
    return repr(_ordered(_state(value, _digested, [0]))) if _decides(value, is_own=True) else ""


def _of_class(cls: type) -> tuple[str, frozenset[str] | None]:
    """Hash a class's code and callees, with all names in it; None if some code belongs to a library."""
    parts: list[str] = []
    names: set[str] = set()
    known = True
    for base in cls.__mro__:
        if not is_users(base.__module__):
            parts.append(f"{base.__module__}.{base.__qualname__} {_version(base.__module__)}")
            known = known and (base.__module__ in _BASES or not base.__module__.startswith(_LIBRARIES))
            continue
        for key, member in vars(base).items():
            for function in _functions(member):
                if key != "__init__":
                    parts.append(f"{key}={_of_function(function, ())}")
                    names |= names_in(function.__code__)
            if is_constant(member) and not key.startswith("__"):
                parts.append(f"{key}={member!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest(), frozenset(names) if known else None


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))


def _functions(member: Any) -> list[FunctionType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        return [function for function in (member.fget,) if isinstance(function, FunctionType)]
    member = inspect.unwrap(member) if callable(member) else member
    return [member] if isinstance(member, FunctionType) else []


def _of_function(function: FunctionType, above: tuple[Any, ...]) -> str:
    """Hash a function's code and defaults, and the user's functions and numbers that it names."""
    code = function.__code__
    parts = [_of_code(code), repr([value for value in function.__defaults__ or () if is_constant(value)])]
    if code in above or len(above) > _DEPTH:
        return parts[0]
    for name, value in _globals(function):
        if isinstance(value, FunctionType) and is_users(value.__module__):
            parts.append(f"{name}={_of_function(value, (*above, code))}")
        elif is_constant(value):
            parts.append(f"{name}={value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals and variables of enclosing functions that a function names."""
    for name in sorted(names_in(function.__code__)):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, inspect.unwrap(value) if isinstance(value, FunctionType) else value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an unassigned variable
            continue


def _of_code(code: CodeType) -> str:
    constants = [
        _of_code(constant) if isinstance(constant, CodeType) else repr(_ordered(constant))
        for constant in code.co_consts
    ]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    # The order of a set follows PYTHONHASHSEED, which differs between processes.
    if isinstance(value, frozenset):
        return sorted(repr(_ordered(item)) for item in value)
    return tuple(map(_ordered, value)) if isinstance(value, tuple) else value


class _Same:
    """A key that equals only that of the same object; it keeps the object alive and its address unique."""

    __slots__ = ("value", "version")

    def __init__(self, value: Any, version: int = 0) -> None:
        self.value = value
        self.version = version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value and other.version == self.version

    def __hash__(self) -> int:
        return hash((id(self.value), self.version))


def current(value: Any) -> Any:
    """Return a key of a value and its content, within this process.

    Raises:
        TypeError: The value holds too much to compare.

    Example:
        >>> options = {"scale": 1.0}
        >>> before = current(options)
        >>> options["scale"] = 2.0
        >>> current(options) == before
        False
    """
    return _state(value, _current, [0])


def _current(leaf: Any) -> Any:
    if isinstance(leaf, nn.Parameter):
        return _Same(leaf)  # by identity: programs read its values at each call
    if isinstance(leaf, Tensor):
        return _Same(leaf, -1 if leaf.is_inference() else leaf._version)
    return _bytes(leaf) if isinstance(leaf, numpy.ndarray) else _Same(leaf)


def _digested(leaf: Any) -> Any:
    """Return a key of a value in any process."""
    if isinstance(leaf, Tensor):
        look = (tuple(leaf.shape), str(leaf.dtype))
        if type(leaf) is not Tensor or leaf.is_meta:
            return look
        return *look, _bytes(as_bytes(leaf.cpu()).numpy())
    if isinstance(leaf, numpy.ndarray):
        return _bytes(leaf)
    if isinstance(leaf, FunctionType) and is_users(leaf.__module__):
        return _of_function(leaf, ())
    if isinstance(leaf, enum.Enum):
        return str(leaf)
    named = leaf if hasattr(leaf, "__qualname__") else type(leaf)
    return getattr(named, "__module__", ""), named.__qualname__


def _bytes(array: Any) -> tuple[Any, ...]:
    content = numpy.ascontiguousarray(array).tobytes() if not array.dtype.hasobject else repr(array).encode()
    return array.shape, array.dtype.str, xxhash.xxh3_128_hexdigest(content)


def _state(value: Any, of_leaf: Callable[[Any], Any], count: list[int], depth: int = 0) -> Any:
    """Take a value apart into comparable items."""
    if is_constant(value):
        return type(value), repr(value) if isinstance(value, (float, slice)) else value
    kind, parts = (None, ()) if depth > _DEPTH else _parts(value)
    if kind is None:
        return of_leaf(value)
    count[0] += 1 + len(parts)
    if count[0] > MOST_VALUES:
        raise TypeError(f"it reads a {type(value).__name__} with more than {MOST_VALUES} values in it")
    inner = [_state(part, of_leaf, count, depth + 1) for part in parts]
    return kind, frozenset(inner) if kind is set else tuple(inner)


def _parts(value: Any) -> tuple[Any, Collection[Any]]:
    """Return the kind of a value and its content; no kind for a value that is compared as it is."""
    for kind in (list, tuple, deque):
        if isinstance(value, kind):
            return kind, value
    if isinstance(value, (set, frozenset)):
        return set, value
    if isinstance(value, Mapping):
        return dict, (*value, *value.values())
    if isinstance(value, functools.partial):
        return "partial", (value.func, value.args, value.keywords)
    whole = isinstance(value, (*DEFINITIONS, MethodType, enum.Enum)) or package(type(value)) in OPAQUE
    if whole:
        return None, ()
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    return (type(value).__qualname__, (*held, *held.values())) if held else (None, ())
