"""What decides whether a kept program may be used: code, structure, shapes, and values that are read."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy
import torch
import xxhash
from torch import Tensor, nn

from nnx_core._torch_compat import pytree
from nnx_core.view.python_state import is_users_own, names_in, origin_of
from nnx_nnscaler.trace.structure import is_constant

# --- fingerprints ---------------------------------------------------------------------------------
# A short text that is equal exactly when a trace would be: over code, structure and shapes, not values.
#
# Ranks compare it before they compile, and what was compiled is kept under it.


_DEPTH = 6
# Classes whose attributes say what they do, while their code does not change within a version.
_LIBRARIES = ("torch.nn.modules.", "transformers.")
_BASES = ("torch.nn.modules.module", "torch.nn.modules.container")
_VERSIONED = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "builtins"),
        *("transformers", "nnx_core", "nnx_nnscaler"),
    ]
)
"""Packages whose code changes with their version."""


def fingerprint(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, deep: bool = True
) -> str:
    """Hash of a module's code and structure, and of what its inputs look like.

    Covers, for every submodule: its class, the code of the class's functions and of the user's functions that
    they call, attributes and globals that this code names, whether it trains, and name, shape, dtype and
    `requires_grad` of its parameters and buffers, whose values are not in it.

    Args:
        module: The root.
        args: Positional arguments of its forward.
        kwargs: Its keyword arguments.
        deep: False leaves out what is in objects and containers, such as a seed of each rank's own.

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
    """Attributes that the class's code names, or all public ones where that is not known."""
    found = []
    for key, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if key != "training" and (key in names if names is not None else not key.startswith("_")):
            text = _plain(value) if deep or is_constant(value) else ""
            if text:
                found.append((key, text))
    return found


def _plain(value: Any) -> str:
    """A text of what a value has in it; none for what is no value."""
    return repr(_ordered(_state(value, _digested, [0]))) if _decides(value, is_own=True) else ""


def _of_class(cls: type) -> tuple[str, frozenset[str] | None]:
    """Hash of a class's code and of what it calls, and all names in it; None where some is a library's."""
    parts: list[str] = []
    names: set[str] = set()
    known = True
    for base in cls.__mro__:
        if not _is_users(base.__module__):
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
    """Hash of a function's code, its defaults, and of the user's functions and numbers that it names."""
    code = function.__code__
    parts = [_of_code(code), repr([value for value in function.__defaults__ or () if is_constant(value)])]
    if code in above or len(above) > _DEPTH:
        return parts[0]
    for name, value in _globals(function):
        if isinstance(value, FunctionType) and _is_users(value.__module__):
            parts.append(f"{name}={_of_function(value, (*above, code))}")
        elif is_constant(value):
            parts.append(f"{name}={value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and variables of enclosing functions that a function names."""
    for name in sorted(names_in(function.__code__)):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, inspect.unwrap(value) if isinstance(value, FunctionType) else value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _of_code(code: CodeType) -> str:
    constants = [
        _of_code(constant) if isinstance(constant, CodeType) else repr(_ordered(constant))
        for constant in code.co_consts
    ]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    # The order of a set follows PYTHONHASHSEED.
    if isinstance(value, frozenset):
        return sorted(repr(_ordered(item)) for item in value)
    return tuple(map(_ordered, value)) if isinstance(value, tuple) else value


def _is_users(module: str) -> bool:
    """Whether code may change without the version of torch or Python changing with it."""
    return module.partition(".")[0] not in _VERSIONED and origin_of(module) != "python"


# --- what a forward reads -------------------------------------------------------------------------
# A program stands for the values that attributes and globals had when it was traced.
#
# ``if self.warm: ...`` and ``x * self.hparams.scale`` are decided by tracing. What they name is found in the
# code of ``forward`` and of what it calls, so that setting one, or changing what is in it, brings about
# another program.


_NOTHING = object()
_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}
_MOST_VALUES = 10_000
_OPAQUE = frozenset([*_VERSIONED, "torchmetrics", "numpy"]) - {"transformers"}
"""Packages whose objects are told apart by identity, not by what is in them."""
_DEFINITIONS = (type, ModuleType, FunctionType, property, staticmethod, classmethod)
_ENVIRONMENT = frozenset(["environ", "getenv"])
_LOGS = frozenset(["log", "log_dict"])
"""Methods whose code, Lightning's, is not looked through."""


class Space(Protocol):
    """Where names have values: an object's ``__dict__``, a class's, or a module's globals."""

    def get(self, name: str, default: Any = None, /) -> Any:
        """The value of a name."""


class _Closure:
    """The variables of enclosing functions."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any = None, /) -> Any:
        try:
            return self._cells[name].cell_contents
        except (KeyError, ValueError):  # not assigned yet
            return default


def read_by_forward(root: nn.Module, *, besides: Collection[str] = ()) -> list[tuple[Space, str]]:
    """Where each value is that the forward of a module, or of one of its submodules, may read, and its name.

    Args:
        root: The module.
        besides: Fully qualified names of submodules that run their own code, whatever their values are.

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
    """The functions of a module and of its submodules, and of their classes, that the forward may call."""
    return _reached(_looked_through(root, ()))[1]


def _looked_through(root: nn.Module, besides: Collection[str]) -> list[nn.Module]:
    return [
        module
        for path, module in root.named_modules()
        if not any(path == other or path.startswith(f"{other}.") for other in besides)
        and _package(type(module)) != "torchmetrics"
    ]


def _decides(value: Any, *, is_own: bool = False) -> bool:
    """Whether a program may depend on a value; functions of classes and modules are followed instead."""
    if value is _NOTHING or isinstance(value, (nn.Module, nn.Parameter, ModuleType, type)):
        return False
    return is_own or not (isinstance(value, _DEFINITIONS) or hasattr(type(value), "__get__"))


def _reached(modules: Sequence[nn.Module]) -> tuple[tuple[str, ...], tuple[FunctionType, ...]]:
    """Names in the code that forwards reach on modules, and the functions that this code is in."""
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
    """What a name stands for on a class, and on its bases if a method of the class calls theirs."""
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
    """The names in the user's methods that name ``super`` or a base, and the names of these methods."""
    bases = {base.__name__ for base in cls.__mro__[1:]} | {"super"}
    found: set[str] = set()
    for owner in filter(lambda one: _is_users(one.__module__), cls.__mro__):
        for own, member in vars(owner).items():
            function = _function_of(member)
            names = names_in(function.__code__) if function is not None else set()
            if names & bases:
                found |= names | {own}
    return frozenset(found)


def _function_of(member: Any) -> FunctionType | None:
    """The function of a method or property."""
    member = member.fget if isinstance(member, property) else member
    member = getattr(member, "__func__", member)
    return inspect.unwrap(member) if isinstance(member, FunctionType) else None


def _read_outside(functions: Iterable[FunctionType]) -> Iterator[tuple[Space, str]]:
    """What the user's functions, and those that they call, read of modules and of enclosing functions."""
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


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


# --- values ---------------------------------------------------------------------------------------


class _Same:
    """Equal to what is about the same object alone, which it keeps, so that no other gets its address."""

    __slots__ = ("value", "version")

    def __init__(self, value: Any, version: int = 0) -> None:
        self.value = value
        self.version = version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value and other.version == self.version

    def __hash__(self) -> int:
        return hash((id(self.value), self.version))


def current(value: Any) -> Any:
    """What tells a value from others, and from its former self, within this process.

    Raises:
        TypeError: There is too much in it.

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
        return _Same(leaf)  # programs read its values anew, and ranks write into parts of it
    if isinstance(leaf, Tensor):
        return _Same(leaf, -1 if leaf.is_inference() else leaf._version)
    return _bytes(leaf) if isinstance(leaf, numpy.ndarray) else _Same(leaf)


def _digested(leaf: Any) -> Any:
    """What tells a value from others in any process."""
    if isinstance(leaf, Tensor):
        look = (tuple(leaf.shape), str(leaf.dtype))
        if type(leaf) is not Tensor or leaf.is_meta:
            return look
        return *look, _bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    if isinstance(leaf, numpy.ndarray):
        return _bytes(leaf)
    if isinstance(leaf, FunctionType) and _is_users(leaf.__module__):
        return _of_function(leaf, ())
    if isinstance(leaf, enum.Enum):
        return str(leaf)
    named = leaf if hasattr(leaf, "__qualname__") else type(leaf)
    return getattr(named, "__module__", ""), named.__qualname__


def _bytes(array: Any) -> tuple[Any, ...]:
    content = numpy.ascontiguousarray(array).tobytes() if not array.dtype.hasobject else repr(array).encode()
    return array.shape, array.dtype.str, xxhash.xxh3_128_hexdigest(content)


def _state(value: Any, of_leaf: Callable[[Any], Any], count: list[int], depth: int = 0) -> Any:
    """A value taken apart into what can be compared."""
    if is_constant(value):
        return type(value), repr(value) if isinstance(value, (float, slice)) else value
    kind, parts = (None, ()) if depth > _DEPTH else _parts(value)
    if kind is None:
        return of_leaf(value)
    count[0] += 1 + len(parts)
    if count[0] > _MOST_VALUES:
        raise TypeError(f"it reads a {type(value).__name__} with more than {_MOST_VALUES} values in it")
    inner = [_state(part, of_leaf, count, depth + 1) for part in parts]
    return kind, frozenset(inner) if kind is set else tuple(inner)


def _parts(value: Any) -> tuple[Any, Collection[Any]]:
    """The kind of a value and what is in it; no kind for what is not taken apart."""
    for kind in (list, tuple, deque):
        if isinstance(value, kind):
            return kind, value
    if isinstance(value, (set, frozenset)):
        return set, value
    if isinstance(value, Mapping):
        return dict, (*value, *value.values())
    if isinstance(value, functools.partial):
        return "partial", (value.func, value.args, value.keywords)
    whole = isinstance(value, (*_DEFINITIONS, MethodType, enum.Enum)) or _package(type(value)) in _OPAQUE
    if whole:
        return None, ()
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    return (type(value).__qualname__, (*held, *held.values())) if held else (None, ())
