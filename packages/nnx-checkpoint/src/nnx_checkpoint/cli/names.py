"""Names of logical tensors, taken apart for people: the tree they form, and what belongs to whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx_checkpoint.cli.output import human_bytes

if TYPE_CHECKING:
    from nnx_checkpoint.index import TensorEntry

__all__ = ["Owner", "kind_of", "natural_order", "owner_of", "tree_lines"]

_STATE = re.compile(r"optim\.(?P<optimizer>[^.]+)\.state\.(?P<parameter>.+)\.(?P<kind>[^.]+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """What a tensor is part of.

    Attributes:
        kind: ``weights``, ``optimizer``, ``objects``, ``ranks`` or ``other``.
        name: Name of the parameter or buffer, without ``model.``; of others the whole name.
        optimizer: For optimizer state, the number of the optimizer.
        state: For optimizer state, its name, such as ``exp_avg``.
    """

    kind: str
    name: str
    optimizer: str = ""
    state: str = ""


def owner_of(name: str) -> Owner:
    """What a logical name says.

    Example:
        >>> owner_of("optim.0.state.head.weight.exp_avg")
        Owner(kind='optimizer', name='head.weight', optimizer='0', state='exp_avg')
    """
    if name.startswith("model."):
        return Owner("weights", name.removeprefix("model."))
    match = _STATE.fullmatch(name)
    if match:
        return Owner("optimizer", match["parameter"], match["optimizer"], match["kind"])
    kinds = {"objects": "objects", "rank": "ranks"}
    return Owner(kinds.get(name.partition(".")[0], "other"), name)


def kind_of(name: str) -> str:
    """The kind of a tensor, in words.

    Example:
        >>> kind_of("optim.0.state.head.weight.exp_avg")
        'optimizer 0 exp_avg'
    """
    owner = owner_of(name)
    return f"optimizer {owner.optimizer} {owner.state}" if owner.kind == "optimizer" else owner.kind


class _Branch:
    """Tensors whose names share a prefix."""

    def __init__(self) -> None:
        self.children: dict[str, _Branch] = {}
        self.leaf = ""
        self.count = 0
        self.nbytes = 0

    def add(self, parts: list[str], leaf: str, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes
        if parts:
            self.children.setdefault(parts[0], _Branch()).add(parts[1:], leaf, nbytes)
        else:
            self.leaf = leaf

    def lines(self, indent: str, depth: int) -> Iterator[str]:
        for name in sorted(self.children, key=natural_order):
            label, child = name, self.children[name]
            while len(child.children) == 1 and not child.leaf:  # a chain is one line
                ((step, child),) = child.children.items()
                label += f".{step}"
            if child.leaf:
                yield f"{indent}{label}  {child.leaf}"
            if child.children:
                yield f"{indent}{label}  [{child.count} tensors, {human_bytes(child.nbytes)}]"
                if depth > 1:
                    yield from child.lines(indent + "  ", depth - 1)


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def tree_lines(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], depth: int) -> Iterator[str]:
    """The names as an indented tree, down to a number of levels."""
    root = _Branch()
    for name, entry in tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        root.add(name.split("."), f"{entry.dtype_name} {shape}, {human_bytes(entry.nbytes)}", entry.nbytes)
    for alias, target in aliases.items():
        root.add(alias.split("."), f"tied to {target}", 0)
    return root.lines("", depth)
