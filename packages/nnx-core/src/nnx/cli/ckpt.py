"""``nnx ckpt``: look into checkpoints and verify them, without importing torch.

This module decides what is shown; `nnx.checkpoint` reads and `nnx.cli.output` prints.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnx.cli.output import print_json, print_note, print_pairs, print_table, print_text

if TYPE_CHECKING:
    from nnx.checkpoint.index import TensorEntry
    from nnx.checkpoint.source import Source

__all__ = ["app", "human_bytes"]

app = typer.Typer(no_args_is_help=True)

_Path = Annotated[Path, typer.Argument(help="A checkpoint's directory, or a link to it.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Depth = Annotated[int, typer.Option(min=1, help="Levels of the tree of tensors to show.")]
_STATE = re.compile(r"optim\.(?P<optimizer>[^.]+)\.state\.(?P<parameter>.+)\.(?P<kind>[^.]+)")


@app.command()
def inspect(path: _Path, depth: _Depth = 99, as_json: _Json = False) -> None:
    """Show what a checkpoint holds: tensors, optimizer state, who wrote it, sizes."""
    from nnx.checkpoint.source import Source

    source = Source.open(path)
    if as_json:
        print_json(_content(source))
        return
    manifest = source.manifest
    print_pairs(
        [
            ("checkpoint", str(path)),
            ("format", ".".join(map(str, manifest.version))),
            ("save", manifest.save_id),
            ("created", manifest.created),
            *((f"writer {name}", str(value)) for name, value in manifest.writer.items()),
            *((f"provenance {name}", str(value)) for name, value in manifest.provenance.items()),
            ("tensors", _totals_line(source)),
            ("files", f"{len(manifest.files)}, {human_bytes(_on_disk(source))}"),
        ]
    )
    for name, optimizer in _optimizers(source.index.tensors).items():
        kinds = ", ".join(f"{kind} ({human_bytes(size)})" for kind, size in optimizer["bytes"].items())
        print_text(f"optimizer {name}: state of {optimizer['parameters']} parameters: {kinds}")
    for number, groups in enumerate(_groups(source)):
        for position, group in enumerate(groups):
            shown = ", ".join(f"{key}={value}" for key, value in group["options"].items())
            print_text(f"optimizer {number}, group {position}: {group['parameters']} parameters, {shown}")
    print_text("")
    for line in _tree(source.index.tensors, source.index.aliases, depth):
        print_text(line)


@app.command()
def verify(path: _Path, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its checksum."""
    from nnx.checkpoint.verifying import verify as verify_checkpoint

    with _progress(shown=not as_json and sys.stderr.isatty()) as progress:
        damage = verify_checkpoint(path, progress=progress)
    if as_json:
        rows = [
            {"file": found.file, "start": found.start, "stop": found.stop, "problem": found.problem}
            for found in damage
        ]
        print_json({"path": str(path), "whole": not damage, "damage": rows})
    elif damage:
        print_table(
            ("file", "bytes", "problem"),
            [(found.file, f"{found.start}-{found.stop}", found.problem) for found in damage],
        )
        print_note(f"{len(damage)} damaged place(s): restore them from a backup, or use another checkpoint.")
    else:
        print_text(f"{path}: every byte is as it was written.")
    raise typer.Exit(1 if damage else 0)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes on the terminal."""
    if not shown:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def human_bytes(count: int) -> str:
    """A size for people.

    Example:
        >>> human_bytes(1_020_700_000)
        '1.02 GB'
    """
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _content(source: Source) -> dict[str, Any]:
    manifest = source.manifest
    return {
        "path": str(source.path),
        "format": {"version": list(manifest.version), "block": manifest.block},
        "save_id": manifest.save_id,
        "created": manifest.created,
        "writer": dict(manifest.writer),
        "provenance": dict(manifest.provenance),
        "totals": {
            "tensors": len(source.index.tensors),
            "elements": sum(entry.numel for entry in source.index.tensors.values()),
            "bytes": sum(entry.nbytes for entry in source.index.tensors.values()),
            "bytes_on_disk": _on_disk(source),
        },
        "optimizers": _optimizers(source.index.tensors),
        "groups": _groups(source),
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": entry.dtype_name,
                "bytes": entry.nbytes,
                "pieces": len(entry.pieces),
            }
            for name, entry in source.index.tensors.items()
        },
        "aliases": dict(source.index.aliases),
        "files": {name: entry.size for name, entry in manifest.files.items()},
    }


def _on_disk(source: Source) -> int:
    return sum(entry.size for entry in source.manifest.files.values())


def _totals_line(source: Source) -> str:
    entries = source.index.tensors.values()
    elements = sum(entry.numel for entry in entries)
    return f"{len(entries)}, {elements:,} elements, {human_bytes(sum(entry.nbytes for entry in entries))}"


def _optimizers(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, Any]]:
    """For each optimizer, how many parameters have state and how many bytes of each kind."""
    found: dict[str, dict[str, Any]] = {}
    parameters: dict[str, set[str]] = {}
    for name, entry in tensors.items():
        match = _STATE.fullmatch(name)
        if match:
            optimizer = found.setdefault(match["optimizer"], {"parameters": 0, "bytes": {}})
            optimizer["bytes"][match["kind"]] = optimizer["bytes"].get(match["kind"], 0) + entry.nbytes
            parameters.setdefault(match["optimizer"], set()).add(match["parameter"])
    for name, optimizer in found.items():
        optimizer["parameters"] = len(parameters[name])
    return found


def _groups(source: Source) -> list[list[dict[str, Any]]]:
    """The parameter groups of each optimizer, where the objects have them under their usual names."""
    tree = json.loads(source.read_file("objects.json"))
    optimizers = tree.get("optim") if isinstance(tree, dict) else None
    return [
        [
            {
                "parameters": len(group.get("params", ())),
                "options": {key: value for key, value in group.items() if _is_option(value)},
            }
            for group in optimizer.get("groups", ())
        ]
        for optimizer in optimizers or ()
        if isinstance(optimizer, dict)
    ]


def _is_option(value: Any) -> bool:
    return isinstance(value, (int, float, str))


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
        for name in sorted(self.children, key=_natural):
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


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def _tree(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], depth: int) -> Iterator[str]:
    root = _Branch()
    for name, entry in tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        root.add(name.split("."), f"{entry.dtype_name} {shape}, {human_bytes(entry.nbytes)}", entry.nbytes)
    for alias, target in aliases.items():
        root.add(alias.split("."), f"tied to {target}", 0)
    return root.lines("", depth)
