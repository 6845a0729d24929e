"""Nested values taken apart into tensors and a structure of `Slot`s, and put together again.

Owns what objects may come out of a forward: containers, dataclasses, named tuples, `ModelOutput`s and their
caches. Knows nothing of graphs.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnx_nnscaler.ir import Make
from nnx_nnscaler.trace.inputs import is_constant

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Refusal(Exception):  # noqa: N818 # never leaves the package: it says why a submodule is kept whole
    """Why a submodule cannot be traced; raised where it is noticed, placed by the traceback."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor was.

    Attributes:
        index: Its number among the tensors.
    """

    index: int


def take_apart(value: Any, tensors: list[Tensor], *, dropped: list[str] | None = None) -> Any:
    """The structure of a value, its tensors appended to a list.

    Args:
        value: The value that a forward returned or was given.
        tensors: The list that its tensors are added to.
        dropped: The list that classes of transformers' key-value caches are added to, which are left out as
            None then: nothing reads them in training. None keeps them.

    Raises:
        Refusal: It holds an object that cannot be made again from its parts.

    Example:
        >>> tensors = []
        >>> take_apart({"loss": torch.zeros(()), "n": 3}, tensors)
        {'loss': Slot(index=0), 'n': 3}
    """

    def go(part: Any) -> Any:
        return take_apart(part, tensors, dropped=dropped)

    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, _SYMBOLIC) or is_constant(value):
        return value
    if type(value) in (list, tuple, torch.Size):
        return (list if isinstance(value, list) else tuple)(go(part) for part in value)
    if type(value) in (dict, OrderedDict) and all(isinstance(key, (str, int)) for key in value):
        return {key: go(part) for key, part in value.items()}
    if _is_cache(value) and dropped is not None:
        dropped.append(type(value).__name__)
        return None
    return _cache(value, go) if _is_cache(value) else _object(value, go)


def put_together(structure: Any, tensors: Sequence[Any]) -> Any:
    """The value that `take_apart` took apart, with other tensors."""

    def fill(part: Any) -> Any:
        return tensors[part.index] if isinstance(part, Slot) else part

    return map_slots(structure, fill, make=_made)


def map_slots(
    structure: Any, leaf: Callable[[Any], Any], *, make: Callable[[Make], Any] | None = None
) -> Any:
    """A structure with every part that is no container replaced."""

    def go(part: Any) -> Any:
        return map_slots(part, leaf, make=make)

    if isinstance(structure, (list, tuple)):
        return type(structure)(go(part) for part in structure)
    if isinstance(structure, dict):
        return {key: go(part) for key, part in structure.items()}
    if isinstance(structure, Make):
        made = Make(structure.type, go(structure.fields))
        return made if make is None else make(made)
    return leaf(structure)


def _object(value: Any, go: Callable[[Any], Any]) -> Make:
    return Make(_location(type(value)), {name: go(part) for name, part in _fields(value).items()})


def _made(made: Make) -> Any:
    module, _, name = made.type.partition(":")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found(**made.fields)


def _location(cls: type) -> str:
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        raise Refusal(f"a {cls.__qualname__}, whose class cannot be imported from {cls.__module__}")
    return f"{cls.__module__}:{cls.__qualname__}"


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(type(value)):
        fields = dataclasses.fields(value)
        if all(field.init for field in fields):
            return {field.name: getattr(value, field.name) for field in fields}
    raise Refusal(f"a {type(value).__qualname__}, which is no tensor, container or dataclass")


def _is_cache(value: Any) -> bool:
    return any(
        base.__name__ == "Cache" and base.__module__ == "transformers.cache_utils"
        for base in type(value).__mro__
    )


def _cache(value: Any, go: Callable[[Any], Any]) -> Make:
    if type(value).__name__ != "DynamicCache":
        raise Refusal(f"a {type(value).__name__}: pass use_cache=False")
    layers = [(layer.keys, layer.values) for layer in value.layers]
    if any(type(layer).__name__ != "DynamicLayer" for layer in value.layers):
        raise Refusal("a cache with sliding windows: pass use_cache=False")
    return Make(_location(type(value)), {"ddp_cache_data": go(layers)})


# --- blame -----------------------------------------------------------------------------------------------
#
# Where in the user's code something happened: by traceback, and by the notes on a trace's operators.
#
# Owns what a source line looks like, and which submodule an error is to blame on.


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')


@dataclass(frozen=True)
class Blame:
    """Who is to blame for a failed trace.

    Attributes:
        fqn: The innermost submodule that was running; ``""`` is the root.
        source: The user's line.
        reason: Says in few words what went wrong.
    """

    fqn: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


def blame(error: BaseException, root: nn.Module) -> Blame:
    """The submodule in whose code an error was raised."""
    names = {id(vars(module)): name for name, module in root.named_modules()}
    best = Blame("", "", _reason(error))
    for part in _chain(error):
        for frame, line in traceback.walk_tb(part.__traceback__):
            path = frame.f_code.co_filename
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(vars(owner)) in names:
                best = Blame(names[id(vars(owner))], best.source, best.reason)
            if not path.startswith((_TORCH, _OWN, "<")):
                best = Blame(best.fqn, _line(path, line), best.reason)
        if best.fqn or best.source:
            return best
    return best


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: BaseException) -> str:
    if isinstance(error, Refusal):
        return str(error)
    name = type(error).__name__
    if "DataDependent" in name:
        return "its control flow or a size depends on the values of a tensor"
    first = str(error).strip().splitlines()
    return f"{name}: {first[0]}" if first else name


def _line(path: str, number: int) -> str:
    code = linecache.getline(path, number).strip()
    where = f"{Path(path).name}:{number}"
    return f"{where}: {code}" if code else where


def source_of(stack_trace: str | None) -> str:
    """The user's line in a note that a trace left on an operator, and torch's own where it differs.

    Example:
        >>> source_of(None)
        ''
    """
    frames = [(path, int(line)) for path, line in _FRAME.findall(stack_trace or "")]
    frames = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in frames if not frame[0].startswith((_TORCH, "<"))]
    if not users:
        return ""
    path, line = users[-1]
    text = _line(path, line)
    last_path, last = frames[-1]
    return text if (last_path, last) == (path, line) else f"{text} <- {Path(last_path).name}:{last}"
