"""``nnx ckpt gc``: removing what no checkpoint needs."""

from __future__ import annotations

from dataclasses import asdict

from nnx_checkpoint.cli.output import human_bytes, print_json, print_note, print_table, print_text
from nnx_checkpoint.garbage import collect_garbage

__all__ = ["run"]


def run(path: str, *, keep_previous: int | None, min_age: float, dry_run: bool, as_json: bool) -> int:
    """Remove it, or with `dry_run` say what would be removed."""
    collected = collect_garbage(path, keep_previous=keep_previous, min_age=min_age, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "path": path,
                "dry_run": dry_run,
                "bytes": collected.nbytes,
                "removed": [
                    {"path": item.path, "kind": item.kind, "bytes": item.nbytes} for item in collected.removed
                ],
                "spared": [asdict(item) for item in collected.spared],
            }
        )
        return 0
    if collected.removed:
        print_table(
            ("path", "kind", "size"),
            [(item.path, item.kind, human_bytes(item.nbytes)) for item in collected.removed],
        )
    for item in collected.spared:
        print_note(f"left alone: {item.path}: {item.why.rstrip('.')}.")
    verb = "would be removed" if dry_run else "removed"
    print_text(f"{len(collected.removed)} {verb}, {human_bytes(collected.nbytes)}.")
    return 0
