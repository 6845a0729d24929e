"""Flatten inputs and outputs of a forward to lists of tensors and a structure."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import keyword
import linecache
import re
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nnx_core._torch_compat import pytree
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.ir.graph import Make

# `Inputs` holds the forward's inputs as leaves: their names, their batch dims, and samples of other batch
# sizes. It never reads the module's code.


BatchDims = Literal["auto"] | None
"""``"auto"``: dim 0 of every tensor whose dim 0 is the most frequent one; None: every size is fixed."""

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis))


def is_constant(value: object) -> bool:
    """Return True if a leaf without tensors can be a constant of a program."""
    return isinstance(value, _PLAIN)


class Names:
    """Unique Python identifiers.

    Args:
        taken: The names that must not be used.

    Example:
        >>> names = Names()
        >>> names.new("blocks.0.weight"), names.new("blocks_0_weight"), names.new("class")
        ('blocks_0_weight', 'blocks_0_weight_1', 'class_')
    """

    # The generated function uses these itself.
    _RESERVED = ("rt", "m", "w", "c", "torch", "F", "B")

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = {*self._RESERVED, *taken, *dir(builtins)}

    def new(self, wish: str) -> str:
        """Return a free identifier like the wish."""
        name = re.sub(r"\W+", "_", wish).strip("_") or "value"
        if name[0].isdigit():
            name = f"value_{name}"
        if keyword.iskeyword(name) or keyword.issoftkeyword(name):
            name += "_"
        free, count = name, 0
        while free in self._taken:
            count += 1
            free = f"{name}_{count}"
        self._taken.add(free)
        return free


@dataclass(frozen=True)
class Inputs:
    """The leaves of ``(args, kwargs)``.

    Attributes:
        names: A Python identifier for every leaf.
        leaves: Tensors, cloned so that no two share memory, and constants.
        spec: The structure of the arguments.
        batched: The indices of the leaves whose dim 0 is the batch.
        batch: The size of the batch; 0 if no leaf has one.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    batched: tuple[int, ...]
    batch: int

    @property
    def tensors(self) -> list[int]:
        """The indices of the leaves that are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with these leaves in place of the tensors."""
        filled = list(self.leaves)
        for index, leaf in zip(self.tensors, leaves, strict=True):
            filled[index] = leaf
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return args, kwargs

    def resized(self, batch: int) -> Inputs:
        """Return the sample with another batch size: rows repeated from the start, or dropped."""
        rows = [row % self.batch for row in range(batch)]
        leaves = [leaf[rows] if i in self.batched else leaf for i, leaf in enumerate(self.leaves)]
        return Inputs(self.names, tuple(leaves), self.spec, self.batched, batch)

    def fixed(self) -> Inputs:
        """Return the sample without batch dims."""
        return Inputs(self.names, self.leaves, self.spec, (), 0)

    def moved(self, device: torch.device | str) -> Inputs:
        """Return the sample with every tensor on a device; tensors without values become zeros."""
        leaves = [_on(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Inputs(self.names, tuple(leaves), self.spec, self.batched, self.batch)


def _on(leaf: Tensor, device: torch.device | str) -> Tensor:
    made = torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.detach().to(device)
    return made.requires_grad_(leaf.requires_grad)


def flatten_inputs(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], batch_dims: BatchDims = "auto"
) -> Inputs:
    """Flatten the arguments of a forward.

    Raises:
        TraceError: They do not fit the forward, or one is neither a tensor, nor a plain value, nor a
            container of them that torch's pytree knows.
    """
    _check_fit(forward, args, kwargs)
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    names, leaves, roots = Names(), [], _positional_names(forward, len(args))
    labels: list[str] = []
    for path, leaf in paths:
        label = _label(path, roots)
        if not isinstance(leaf, Tensor) and not is_constant(leaf):
            raise TraceError(
                f"argument {label!r} of the forward is a {type(leaf).__name__}: expected a tensor, a plain "
                "value, or a list, tuple or dict of them.",
                remedy="Pass its tensors one by one, or register the class with torch.utils._pytree.",
            )
        labels.append(names.new(label))
        leaves.append(_copy(leaf) if isinstance(leaf, Tensor) else leaf)
    batched, batch = _find_batch(leaves) if batch_dims == "auto" else ((), 0)
    return Inputs(tuple(labels), tuple(leaves), spec, batched, batch)


def _check_fit(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(arg).__name__ for arg in args), *(f"{name}=" for name in kwargs)])
        raise TraceError(
            f"the sample does not fit forward{signature}: {error} (given: {given or 'nothing'}).",
            remedy="Give dummy_forward_args the names and values that forward takes.",
        ) from None


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return [f"arg_{index}" for index in range(count)]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names


def _label(path: tuple[Any, ...], roots: list[str]) -> str:
    group, *rest = path
    keys = [
        str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))) for entry in rest
    ]
    if group.idx == 0:
        keys[0] = roots[int(keys[0])]
    return ".".join(keys)


def _copy(leaf: Tensor) -> Tensor:
    # Clones, because the exporter merges tensors that share memory: ids and labels are often the same tensor.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _find_batch(leaves: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not sizes:
        return (), 0
    counted = Counter(sizes)
    most = max(counted.values())
    batch = next(size for size in sizes if counted[size] == most)
    if batch == 0:
        return (), 0
    found = tuple(
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch
    )
    return found, batch


# Errors of tracing always name the line of the user's code.


class TraceError(UnsupportedError):
    """The forward cannot be traced to a graph; the message names the submodule and the source line."""


# Nested values split into tensors and a structure of `Slot`s, and back. This section knows the objects that a
# forward may return: containers, dataclasses, named tuples, `ModelOutput`s and their caches. It knows no
# graphs.


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Refusal(Exception):  # noqa: N818 # never leaves the package: the reason for a fallback to eager
    """The reason why a submodule cannot be traced; the traceback shows its place."""


@dataclass(frozen=True)
class Slot:
    """The position of a tensor in a structure.

    Attributes:
        index: The index of the tensor.
    """

    index: int


def take_apart(value: Any, tensors: list[Tensor], *, dropped: list[str] | None = None) -> Any:
    """Return the structure of a value, and append its tensors to a list.

    Args:
        value: The argument or result of a forward.
        tensors: The list that gets the tensors.
        dropped: The list that gets the classes of transformers' key-value caches. These become None, because
            training does not read them. None keeps the caches.

    Raises:
        Refusal: The value holds an object that cannot be rebuilt from its fields.

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
    """Rebuild the value of `take_apart` with other tensors."""

    def fill(part: Any) -> Any:
        return tensors[part.index] if isinstance(part, Slot) else part

    return map_slots(structure, fill, make=_made)


def map_slots(
    structure: Any, leaf: Callable[[Any], Any], *, make: Callable[[Make], Any] | None = None
) -> Any:
    """Return a structure with every item that is no container replaced."""

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


# The place of an event in the user's code: by traceback, and by the notes on a trace's operators. This
# section formats source lines, and finds the submodule that caused an error.


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_OF_LIGHTNING = re.compile(r"site-packages/(lightning|pytorch_lightning)/")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')


@dataclass(frozen=True)
class Blame:
    """The submodule that caused a failed trace.

    Attributes:
        fqn: The innermost running submodule; ``""`` is the root.
        source: The user's line.
        reason: The reason in a few words.
    """

    fqn: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


def blame(error: BaseException, root: nn.Module) -> Blame:
    """Return the submodule whose code raised an error."""
    names = {id(vars(module)): name for name, module in root.named_modules()}
    best = Blame("", "", _reason(error))
    for part in _chain(error):
        for frame, line in traceback.walk_tb(part.__traceback__):
            path = frame.f_code.co_filename
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(vars(owner)) in names:
                best = Blame(names[id(vars(owner))], best.source, best.reason)
            if not path.startswith((_TORCH, _OWN, "<")) and not _OF_LIGHTNING.search(path):
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
    """Return the user's line in the note of an operator, and torch's own line if it differs.

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
