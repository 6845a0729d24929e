"""``nnx ckpt inspect``: what a checkpoint holds, and where its bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnx_checkpoint.cli.content import Content, groups_of, optimizers_of, progress_of, read_content
from nnx_checkpoint.cli.names import tree_lines
from nnx_checkpoint.cli.output import human_bytes, print_json, print_note, print_pairs, print_text
from nnx_checkpoint.cli.plain import shown
from nnx_checkpoint.cli.sizes import bar_lines, draw, sizes_by_kind, sizes_by_module

__all__ = ["run"]


def run(path: str, *, depth: int, plot: Path | None, weights_only: bool, as_json: bool) -> int:
    """Print the contents, and draw a picture of the sizes if asked to."""
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
    """Lightning keys the state of a callback by its class, with arguments in braces behind it."""
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


def _as_json(content: Content) -> dict[str, Any]:
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
