"""Find effects of a forward that a program would lose: printing, files, clocks, loggers, iterators.

A trace runs such code once, and the graph does not show it. So this module searches the code that a forward
reaches.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from nnx_core.view.side_effects import cannot_rewind, is_users_own
from nnx_nnscaler.trace.reads import code_reached, read_by_forward
from nnx_nnscaler.trace.structure import Refusal

_OF_TENSORS = frozenset(
    [
        *("torch", "torchvision", "torchaudio", "torchmetrics", "transformers", "timm", "einops"),
        *("numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("nnx_core", "nnx_nnscaler", "jaxtyping", "typing_extensions", "omegaconf"),
        *("ml_collections", "pydantic", "attr"),
    ]
)
"""Packages whose functions only compute, and whose objects only hold values."""


_OF_PYTHON = frozenset(
    [
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
        *("decimal", "enum", "fractions", "functools", "itertools", "math", "numbers", "operator"),
        *("re", "string", "types", "typing", "warnings"),
    ]
)


_EFFECTS = frozenset(["open", "input", "next", "id", "exec", "eval", "breakpoint"])
"""Builtins that do more than compute; a trace notices `print` when it is called."""


def refuse_generators(root: nn.Module) -> None:
    """Refuse a forward that may advance an iterator or a generator, because a trace cannot rewind these.

    Args:
        root: The module.

    Raises:
        Refusal: The forward may do so.
    """
    for space, name in read_by_forward(root):
        value = space.get(name)
        if isinstance(value, torch.Generator):
            raise _refusal(name, "a generator of random numbers, which a graph cannot hold")
        if cannot_rewind(value):
            raise _refusal(name, f"a {type(value).__name__}, which advances and cannot be rewound")


def refuse_effects(root: nn.Module, *, of: type) -> None:
    """Refuse user code that does more than compute.

    Args:
        root: The module whose forward is searched.
        of: A class by the user, in any package; layers of other packages are not searched.

    Raises:
        Refusal: The code does more.
    """
    _Search(root, of).run()


class _Search:
    """A walk through the functions that a forward reaches."""

    def __init__(self, root: nn.Module, of: type) -> None:
        self._home = of.__module__.partition(".")[0]
        self._names: set[str] = set()
        self._classes: set[type] = set()
        self._left = [one for one in code_reached(root) if self._is_users(one.__module__)]
        attributes = {id(vars(module)) for module in root.modules()}
        for space, name in read_by_forward(root):
            if id(space) in attributes:
                self._look_at(name, space.get(name))

    def _is_users(self, module: str) -> bool:
        package = module.partition(".")[0]
        return package not in sys.stdlib_module_names and (is_users_own(module) or package == self._home)

    def run(self) -> None:
        seen: set[FunctionType] = set()
        while self._left:
            for function in self._left:
                if function not in seen and not _computes(function.__module__ or ""):
                    seen.add(function)
                    self._look_through(function)
            methods = [vars(cls).get(name) for cls in self._classes for name in self._names]
            self._left = [one for one in methods if isinstance(one, FunctionType) and one not in seen]

    def _look_through(self, function: FunctionType) -> None:
        for name, value in _used(function):
            try:
                self._look_at(name, value)
            except Refusal as refusal:
                code = function.__code__
                place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                raise Refusal(f"{function.__qualname__} ({place}) {refusal}") from None

    def _look_at(self, name: str, value: Any) -> None:
        """Check a value that code names."""
        self._names.add(name)
        value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, partial):
            self._look_at(name, value.func)
        elif isinstance(value, FunctionType) and not _computes(value.__module__ or ""):
            self._left.append(value)
        elif isinstance(value, ModuleType):
            self._look_into(name, value.__name__)
        elif not isinstance(value, nn.Module):
            cls = value if isinstance(value, type) else type(value)
            if hasattr(type(value), "__next__"):
                raise _refusal(name, "an iterator, which advances")
            home = getattr(value, "__module__", None)
            self._look_into(name, home if isinstance(home, str) else cls.__module__, cls)

    def _look_into(self, name: str, module: str, cls: type | None = None) -> None:
        if module == "builtins" and name in _EFFECTS and cls is type(print):
            raise _refusal(name, "which is no computation")
        if _computes(module):
            return
        if not self._is_users(module):
            raise _refusal(name, f"of {module}, which may do more than compute")
        if cls is not None and self._is_users(cls.__module__):
            self._classes.add(cls)


def _computes(module: str) -> bool:
    return module.partition(".")[0].lstrip("_") in _OF_TENSORS | _OF_PYTHON or module == "__future__"


def _refusal(name: str, what: str) -> Refusal:
    return Refusal(f"uses {name!r}, {what}")


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the objects that a function's code names: globals, builtins, imports, module attributes."""
    nothing = object()
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "IMPORT_NAME":
                yield name, sys.modules.get(name, ModuleType(name))
            elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, nothing))
                if value is not nothing and value is not builtins.print:  # Ray replaces `print` by its own
                    yield name, value
                if isinstance(value, ModuleType) and is_users_own(value.__name__):
                    held = [(other, vars(value).get(other, nothing)) for other in code.co_names]
                    yield from ((other, one) for other, one in held if one is not nothing)
            elif instruction.opname == "LOAD_DEREF" and name in cells:
                try:
                    yield name, cells[name].cell_contents
                except ValueError:  # an unassigned variable
                    continue
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                yield name, None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
