"""Run ``nnx ckpt inspect``: print a checkpoint's content and sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from nnx_base.errors import CheckpointError, UnsupportedError
from nnx_checkpoint.cli.content import (
    Content,
    OptimizerState,
    ParameterGroup,
    groups_of,
    kind_of,
    natural_order,
    optimizers_of,
    owner_of,
    progress_of,
    read_content,
    shown,
    tree_lines,
)
from nnx_checkpoint.cli.output import human_bytes, print_json, print_note, print_pairs, print_text

if TYPE_CHECKING:
    from nnx_checkpoint.format.index import TensorEntry


# Sum the bytes of a checkpoint by kind of tensor and by module, and draw them as bars of text or an image.


_BAR = 32
_MODULES = 16
"""The most modules shown: the largest are split while all fit."""
_REPEATED = 8
"""The number of numbered sibling modules from which they are shown as one, such as ``layers.*``."""
_ORDER = ("weights", "optimizer", "objects", "ranks", "other")


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """Bytes that belong to the parameters and buffers below a name.

    Attributes:
        name: The name of the module, or of a parameter of its own.
        weights: Bytes of the parameters and buffers.
        optimizer: Bytes of the optimizers' state for them.
    """

    name: str
    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.weights + self.optimizer


def sizes_by_kind(tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of weights, of each optimizer's states, and of other tensors (existing kinds only)."""
    found: dict[str, int] = {}
    for name, entry in tensors.items():
        kind = kind_of(name)
        found[kind] = found.get(kind, 0) + entry.nbytes
    return {kind: found[kind] for kind in sorted(found, key=lambda k: (_ORDER.index(k.split()[0]), k))}


def sizes_by_module(tensors: Mapping[str, TensorEntry]) -> list[ModuleSize]:
    """Return the bytes by module, in the order of names, at a depth with about a dozen modules.

    Many numbered siblings are added up.
    """
    leaves: dict[str, list[int]] = {}  # by module: bytes of weights, bytes of optimizer state
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
    """Replace the numbers of many siblings by ``*``, and add up entries that become equal."""
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
    """Split the largest group that can be split; return None if that gives too many groups."""
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
    """Yield kinds and modules as horizontal bars of text."""
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
    """Return the length of a bar in characters."""
    return round(_BAR * count / most) if most else 0


def _blocks() -> tuple[str, str, str]:
    """Return the characters for weights, for optimizer state, and for bars shorter than one character."""
    try:
        "█░▏".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#", "-", "."
    return "█", "░", "▏"


def draw(path: Path, title: str, kinds: Mapping[str, int], modules: Sequence[ModuleSize]) -> None:
    """Draw kinds and modules into an image, whose type is the suffix of the path.

    Raises:
        UnsupportedError: matplotlib is not installed.
        CheckpointError: The image cannot be written.
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
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise CheckpointError(
            f"cannot write the image '{path}': {error}.",
            remedy="Choose a name that ends in .png, .svg or .pdf, in a writable directory.",
        ) from error


def _finish(axes: Any, title: str, bars: Any, totals: Sequence[int]) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.bar_label(bars, labels=[human_bytes(total) for total in totals], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


class Totals(TypedDict):
    """Sums over all tensors and files."""

    tensors: int
    elements: int
    bytes: int
    bytes_on_disk: int


class ModuleBytes(TypedDict):
    """The bytes of the tensors of a module."""

    module: str
    weights: int
    optimizer: int


class RankState(TypedDict):
    """The objects that each rank stored.

    Attributes:
        ranks: The number of ranks with objects.
        first: The objects of the first such rank.
    """

    ranks: int
    first: Any


class Tensor(TypedDict):
    """One tensor."""

    shape: list[int]
    dtype: str
    bytes: int
    pieces: int


class Inspection(TypedDict):
    """The output of ``nnx ckpt inspect --json``.

    Attributes:
        block: The number of bytes that one checksum covers.
        world_size: The number of ranks that wrote it.
        writer: The versions of the program that wrote it.
        provenance: Strategy and plan, for information only.
        groups: The parameter groups of each optimizer.
        trainer: Lightning's entries besides tensors.
        aliases: Tied names, each mapped to its stored name.
        files: The size of each file in bytes.
    """

    path: str
    format: str
    version: list[int]
    block: int | None
    save_id: str
    created: str
    epoch: int | None
    step: int | None
    world_size: int | None
    writer: dict[str, Any]
    provenance: dict[str, Any]
    totals: Totals
    bytes_by_kind: dict[str, int]
    bytes_by_module: list[ModuleBytes]
    optimizers: dict[str, OptimizerState]
    groups: list[list[ParameterGroup]]
    trainer: dict[str, Any]
    rank_state: RankState
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    files: dict[str, int]


def run(path: str, *, depth: int, plot: Path | None, weights_only: bool, as_json: bool) -> int:
    """Print the content, and draw the sizes into `plot` if given; return the exit code."""
    content = read_content(path, weights_only=weights_only)
    if as_json:
        print_json(_as_json(content))
    else:
        _print(content, depth)
    if plot is not None:
        draw(plot, content.path, sizes_by_kind(content.tensors), sizes_by_module(content.tensors))
        print_note(f"drew '{plot}'")
    return 0


def _print(content: Content, depth: int) -> None:
    print_pairs(_head(content))
    for name, optimizer in optimizers_of(content.tensors).items():
        kinds = ", ".join(f"{kind} ({human_bytes(size)})" for kind, size in optimizer["bytes"].items())
        print_text(f"optimizer {name}: state of {optimizer['parameters']} parameters: {kinds}")
    for number, groups in enumerate(groups_of(content.objects)):
        for position, group in enumerate(groups):
            options = shown(group["options"])
            print_text(f"optimizer {number}, group {position}: {group['parameters']} parameters, {options}")
    print_text("")
    for line in bar_lines(sizes_by_kind(content.tensors), sizes_by_module(content.tensors)):
        print_text(line)
    print_text("")
    for line in tree_lines(content.tensors, content.aliases, depth):
        print_text(line)


def _head(content: Content) -> list[tuple[str, str]]:
    epoch, step = progress_of(content.trainer)
    version = ".".join(map(str, content.version))
    totals = f"{len(content.tensors)}, {content.elements:,} elements, {human_bytes(content.nbytes)}"
    return [
        ("checkpoint", content.path),
        ("format", f"{content.format} {version}".strip()),
        ("save", content.save_id),
        ("created", content.created),
        ("epoch", "" if epoch is None else str(epoch)),
        ("step", "" if step is None else str(step)),
        ("world size", str(content.world_size)),
        *((f"writer {key}", str(value)) for key, value in content.writer.items() if key != "world_size"),
        *((f"provenance {key}", str(value)) for key, value in content.provenance.items()),
        ("tensors", totals),
        ("files", f"{len(content.files)}, {human_bytes(content.bytes_on_disk)}"),
        ("hyper-parameters", shown(content.trainer.get("hyper_parameters", ""))),
        ("callbacks", ", ".join(_names(content.trainer.get("callbacks")))),
        ("rank state", _rank_line(content)),
    ]


def _names(callbacks: Any) -> list[str]:
    """Return the class names of callbacks (Lightning's keys are a class, then arguments in braces)."""
    return [str(name).partition("{")[0] for name in callbacks] if isinstance(callbacks, dict) else []


def _rank_line(content: Content) -> str:
    if not content.ranks:
        return ""
    state, ranks = content.rank_state, f"of {content.ranks} rank{'s' if content.ranks > 1 else ''}"
    if not isinstance(state, dict):
        return ranks
    parts = [
        f"{key} ({', '.join(map(str, value))})" if isinstance(value, dict) else str(key)
        for key, value in state.items()
        if value is not None
    ]
    return f"{ranks}: {', '.join(parts)}"


def _as_json(content: Content) -> Inspection:
    epoch, step = progress_of(content.trainer)
    return {
        "path": content.path,
        "format": content.format,
        "version": list(content.version),
        "block": content.block,
        "save_id": content.save_id,
        "created": content.created,
        "epoch": epoch,
        "step": step,
        "world_size": content.world_size,
        "writer": dict(content.writer),
        "provenance": dict(content.provenance),
        "totals": {
            "tensors": len(content.tensors),
            "elements": content.elements,
            "bytes": content.nbytes,
            "bytes_on_disk": content.bytes_on_disk,
        },
        "bytes_by_kind": sizes_by_kind(content.tensors),
        "bytes_by_module": [
            {"module": size.name, "weights": size.weights, "optimizer": size.optimizer}
            for size in sizes_by_module(content.tensors)
        ],
        "optimizers": optimizers_of(content.tensors),
        "groups": groups_of(content.objects),
        "trainer": content.trainer,
        "rank_state": {"ranks": content.ranks, "first": content.rank_state},
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": entry.dtype_name,
                "bytes": entry.nbytes,
                "pieces": len(entry.pieces),
            }
            for name, entry in content.tensors.items()
        },
        "aliases": dict(content.aliases),
        "files": dict(content.files),
    }
