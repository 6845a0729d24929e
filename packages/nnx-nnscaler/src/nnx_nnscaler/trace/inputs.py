"""The forward's inputs as leaves: their names, which dims are the batch, and samples of other batch sizes.

Owns everything between ``(args, kwargs)`` and a flat list; never looks into the module's code.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nnx_core.errors import UnsupportedError

BatchDims = Literal["auto"] | None
"""``"auto"``: dim 0 of every tensor whose dim 0 is the most frequent one; None: every size is fixed."""

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis))


def is_constant(value: object) -> bool:
    """Whether a leaf that is no tensor can be part of a program as it is."""
    return isinstance(value, _PLAIN)


class Names:
    """Python identifiers, each handed out once.

    Args:
        taken: Names that must not be used.

    Example:
        >>> names = Names()
        >>> names.new("blocks.0.weight"), names.new("blocks_0_weight"), names.new("class")
        ('blocks_0_weight', 'blocks_0_weight_1', 'class_')
    """

    # What the emitted function uses itself.
    _RESERVED = ("rt", "m", "w", "c", "torch", "F", "B")

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = {*self._RESERVED, *taken, *dir(builtins)}

    def new(self, wish: str) -> str:
        """A free identifier like the wish."""
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
        spec: Structure that they came from.
        batched: Indices of the leaves whose dim 0 is the batch.
        batch: Size of the batch; 0 when no leaf has one.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    batched: tuple[int, ...]
    batch: int

    @property
    def tensors(self) -> list[int]:
        """Indices of the leaves that are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with these leaves in place of the tensors."""
        filled = list(self.leaves)
        for index, leaf in zip(self.tensors, leaves, strict=True):
            filled[index] = leaf
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return args, kwargs

    def resized(self, batch: int) -> Inputs:
        """The same sample with another batch size: rows repeated from the start, or cut."""
        rows = [row % self.batch for row in range(batch)]
        leaves = [leaf[rows] if i in self.batched else leaf for i, leaf in enumerate(self.leaves)]
        return Inputs(self.names, tuple(leaves), self.spec, self.batched, batch)

    def fixed(self) -> Inputs:
        """The same with no dim that is the batch."""
        return Inputs(self.names, self.leaves, self.spec, (), 0)

    def moved(self, device: torch.device | str) -> Inputs:
        """The same with every tensor on a device; those without values are zeros there."""
        leaves = [_on(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Inputs(self.names, tuple(leaves), self.spec, self.batched, self.batch)


def _on(leaf: Tensor, device: torch.device | str) -> Tensor:
    made = torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.detach().to(device)
    return made.requires_grad_(leaf.requires_grad)


def flatten_inputs(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], batch_dims: BatchDims = "auto"
) -> Inputs:
    """Take the arguments of a forward apart.

    Raises:
        TraceError: They do not fit the forward, or one is an object that is neither a tensor, nor a plain
            value, nor a container of them that torch's pytree knows.
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
    # Tensors that share memory would be taken for one input: ids and labels are often the same tensor.
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


# --- errors ----------------------------------------------------------------------------------------------
#
# What tracing raises: always with the line of the user's code that it is about.


class TraceError(UnsupportedError):
    """The forward cannot be turned into a graph; the message names the submodule and the source line."""


class GraphFormatError(UnsupportedError):
    """A stored graph cannot be read: damaged, of another version, or not a graph at all."""
