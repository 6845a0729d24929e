"""What decides whether a kept program may be used: code, structure, shapes, attributes that are read."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnx_nnscaler.trace.structure import is_constant

# --- fingerprints ---------------------------------------------------------------------------------
# A short text that is equal exactly when a trace would be: over code, structure and shapes, not values.
#
# Ranks compare it before they compile, and what was compiled is kept under it.


_DEPTH = 6
# Classes whose attributes say what they do, while their code does not change within a version.
_LIBRARIES = ("torch.nn.modules.", "transformers.")
_BASES = ("torch.nn.modules.module", "torch.nn.modules.container")


def fingerprint(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """Hash of a module's code and structure, and of what its inputs look like.

    Covers, for every submodule: its class, the code of the class's functions and of the user's functions that
    they call, plain attributes that this code names, whether it trains, and name, shape, dtype and
    `requires_grad` of its parameters and buffers. Values of tensors are not in it.

    Args:
        module: The root.
        args: Positional arguments of its forward.
        kwargs: Its keyword arguments.

    Example:
        >>> import torch
        >>> one, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> fingerprint(one, (torch.zeros(3, 4),)) == fingerprint(other, (torch.ones(3, 4),))
        True
        >>> fingerprint(one, (torch.zeros(3, 4),)) == fingerprint(other, (torch.ones(5, 4),))
        False
    """
    digest = hashlib.sha256()
    for part in (*_of_modules(module), *_of_inputs(args, kwargs or {})):
        digest.update(repr(part).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _of_modules(root: nn.Module) -> Iterator[Any]:
    known: dict[int, str] = {}
    classes: dict[type, tuple[str, frozenset[str] | None]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        cls = type(module)
        if cls not in classes:
            classes[cls] = _of_class(cls)
        code, names = classes[cls]
        yield name, cls.__module__, cls.__qualname__, module.training, code
        yield _attributes(module, names)
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


def _attributes(module: nn.Module, names: frozenset[str] | None) -> list[tuple[str, str]]:
    """Plain attributes that the class's code names, or all public ones where that is not known."""
    found = []
    for key, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if key != "training" and (key in names if names is not None else not key.startswith("_")):
            text = _plain(value)
            if text:
                found.append((key, text))
    return found


def _plain(value: Any) -> str:
    if is_constant(value):
        return repr(value)
    if isinstance(value, (list, tuple)) and all(map(is_constant, value)):
        return repr(value)
    describe = getattr(value, "to_json_string", None)  # configurations of transformers
    return str(describe()) if callable(describe) and not isinstance(value, nn.Module) else ""


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
                    names |= _names(function.__code__)
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
    for name in sorted(_names(function.__code__)):
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
        _of_code(constant) if isinstance(constant, CodeType) else _ordered(constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ordered(constant: Any) -> str:
    # The order of a set follows PYTHONHASHSEED.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


@functools.lru_cache(maxsize=1024)
def _is_users(module: str) -> bool:
    """Whether code may change without the version of torch or Python changing with it."""
    top = module.partition(".")[0]
    if top in ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "builtins", "transformers"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or not Path(file).is_relative_to(sysconfig.get_paths()["stdlib"])


# --- plain attributes -----------------------------------------------------------------------------
# Plain attributes that a forward may read: a program stands for the values that they had when traced.
#
# ``if self.warm: ...`` is decided by tracing. Such attributes are found in the code of ``forward`` and of
# the methods and properties that it names, so that setting one brings about another program.


_PLAIN = (bool, int, float, complex, str, type(None))
_NOTHING = object()
_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}


def read_by_forward(root: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where each such attribute is, or would be if set: the ``__dict__`` of its module, and its name.

    Example:
        >>> dropout = nn.Dropout(0.1)
        >>> sorted(name for _, name in read_by_forward(dropout))
        ['inplace', 'p']
    """
    found = []
    for module in root.modules():
        names = _names_in_forward(type(module))  # type: ignore[arg-type] # mypy on hashes
        space, cls = vars(module), type(module)
        found += [(space, name) for name in names if _is_plain(space.get(name, getattr(cls, name, _NOTHING)))]
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


@cache
def _names_in_forward(cls: type) -> tuple[str, ...]:
    """Names in the code that a class's forward reaches on the object itself."""
    seen: set[str] = set()
    reached = ["forward"]
    while reached:
        name = reached.pop()
        for function in _functions_read(cls, name):
            for other in _names_read(function.__code__):
                if other not in seen:
                    seen.add(other)
                    reached.append(other)
    return tuple(sorted(seen - _OWN_OF_MODULES))


def _functions_read(cls: type, name: str) -> Iterator[FunctionType]:
    """What a name stands for on a class and its bases, for ``super()`` reaches those."""
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)
        if isinstance(member, FunctionType):
            yield member


def _names_read(code: CodeType) -> set[str]:
    """Every name that a function's code uses, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *(name for function in inner for name in _names_read(function))}
