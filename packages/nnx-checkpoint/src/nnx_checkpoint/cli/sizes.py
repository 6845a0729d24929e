"""Where the bytes of a checkpoint are: by kind of tensor and by module, as bars of text or as a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx_checkpoint.cli.names import kind_of, natural_order, owner_of
from nnx_checkpoint.cli.output import human_bytes
from nnx_checkpoint.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from nnx_checkpoint.index import TensorEntry

__all__ = ["ModuleSize", "bar_lines", "draw", "sizes_by_kind", "sizes_by_module"]

_BAR = 32
_MODULES = 16
"""Modules shown at most: the largest are split up as long as they all fit."""
_REPEATED = 8
"""So many numbered modules beside each other are shown as one, such as ``layers.*``."""
_ORDER = ("weights", "optimizer", "objects", "ranks", "other")


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """Bytes that belong to the parameters and buffers below a name.

    Attributes:
        name: Of the module, or of a parameter of its own.
        weights: Bytes of the parameters and buffers.
        optimizer: Bytes of the optimizers' state for them.
    """

    name: str
    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer


def sizes_by_kind(tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Bytes of weights, of each optimizer's states, and of the rest; the kinds that there are."""
    found: dict[str, int] = {}
    for name, entry in tensors.items():
        kind = kind_of(name)
        found[kind] = found.get(kind, 0) + entry.nbytes
    return {kind: found[kind] for kind in sorted(found, key=lambda k: (_ORDER.index(k.split()[0]), k))}


def sizes_by_module(tensors: Mapping[str, TensorEntry]) -> list[ModuleSize]:
    """Bytes by module, so deep that there are about a dozen, in the order of their names.

    Where many modules have numbers, those of all of them are added up.
    """
    leaves: dict[str, list[int]] = {}  # of modules that own tensors; first weights, then optimizer state
    for name, entry in tensors.items():
        owner = owner_of(name)
        if owner.kind in ("weights", "optimizer"):
            sums = leaves.setdefault(owner.name.rpartition(".")[0] or owner.name, [0, 0])
            sums[owner.kind == "optimizer"] += entry.nbytes
    leaves = _fold_repeated(leaves)
    groups = {"": list(leaves)}
    while True:
        finer = _split_largest(groups, leaves)
        if finer is None:
            break
        groups = finer
    sizes = [
        ModuleSize(prefix or "(all)", *(sum(leaves[name][i] for name in names) for i in (0, 1)))
        for prefix, names in groups.items()
        if names
    ]
    return sorted(sizes, key=lambda size: natural_order(size.name))


def _fold_repeated(leaves: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Put ``*`` in place of numbers that many siblings have, and add up what is then the same."""
    numbers: dict[str, set[str]] = {}
    for name in leaves:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                numbers.setdefault(".".join(parts[:depth]), set()).add(part)
    folded: dict[str, list[int]] = {}
    for name, sizes in leaves.items():
        parts = name.split(".")
        kept = [
            "*" if part.isdecimal() and len(numbers[".".join(parts[:depth])]) > _REPEATED else part
            for depth, part in enumerate(parts)
        ]
        sums = folded.setdefault(".".join(kept), [0, 0])
        for i, size in enumerate(sizes):
            sums[i] += size
    return folded


def _split_largest(
    groups: Mapping[str, list[str]], leaves: Mapping[str, list[int]]
) -> dict[str, list[str]] | None:
    """Split the largest group that can be; None when there would be too many."""
    by_size = sorted(groups, key=lambda prefix: -sum(sum(leaves[name]) for name in groups[prefix]))
    for prefix in by_size:
        if groups[prefix] == [prefix]:
            continue
        depth = prefix.count(".") + 1 if prefix else 0
        parts: dict[str, list[str]] = {}
        for name in groups[prefix]:
            parts.setdefault(".".join(name.split(".")[: depth + 1]), []).append(name)
        if len(groups) - 1 + len(parts) > _MODULES:
            return None
        return {**{key: names for key, names in groups.items() if key != prefix}, **parts}
    return None


def bar_lines(kinds: Mapping[str, int], modules: Sequence[ModuleSize]) -> Iterator[str]:
    """Both as horizontal bars of text."""
    solid, light, hair = _blocks()
    width = max(map(len, (*kinds, *(module.name for module in modules))), default=0)
    yield "bytes by kind"
    most = max(kinds.values(), default=0)
    for kind, count in kinds.items():
        bar = solid * _length(count, most) or hair
        yield f"  {kind.ljust(width)}  {bar:{_BAR}}  {human_bytes(count)}"
    if not modules:
        return
    yield f"bytes by module ({solid} weights, {light} optimizer state)"
    most = max(module.total for module in modules)
    for module in modules:
        filled = _length(module.total, most)
        weights = min(filled, round(filled * module.weights / module.total)) if module.total else 0
        bar = solid * weights + light * (filled - weights) or hair
        yield f"  {module.name.ljust(width)}  {bar:{_BAR}}  {human_bytes(module.total)}"


def _length(count: int, most: int) -> int:
    """Characters of a bar."""
    return round(_BAR * count / most) if most else 0


def _blocks() -> tuple[str, str, str]:
    """Characters for weights, for optimizer state, and for what is too little to be seen."""
    try:
        "█░▏".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#", "-", "."
    return "█", "░", "▏"


def draw(path: Path, title: str, kinds: Mapping[str, int], modules: Sequence[ModuleSize]) -> None:
    """Draw both into a picture; the ending of the name says of which kind.

    Raises:
        UnsupportedError: matplotlib is not installed.
        CheckpointError: The picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"cannot draw '{path}': matplotlib is not installed.",
            remedy="Run `pip install 'nnx-core[plot]'`.",
        ) from error
    heights = [len(kinds) + 1, max(1, len(modules)) + 1]
    figure = Figure(figsize=(9, 1.2 + 0.32 * sum(heights)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    figure.suptitle(title)
    colors = ["tab:orange" if kind.startswith("optimizer") else "tab:blue" for kind in kinds]
    bars = above.barh(list(kinds), list(kinds.values()), color=colors)
    _finish(above, "bytes by kind", bars, list(kinds.values()))
    names = [module.name for module in modules]
    weights = [module.weights for module in modules]
    below.barh(names, weights, color="tab:blue", label="weights")
    bars = below.barh(
        names, [m.optimizer for m in modules], left=weights, color="tab:orange", label="optimizer state"
    )
    _finish(below, "bytes by module", bars, [module.total for module in modules])
    below.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an unknown ending
        raise CheckpointError(
            f"cannot write the picture '{path}': {error}.",
            remedy="Choose a name that ends in .png, .svg or .pdf, in a directory that can be written to.",
        ) from error


def _finish(axes: Any, title: str, bars: Any, totals: Sequence[int]) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.bar_label(bars, labels=[human_bytes(total) for total in totals], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
