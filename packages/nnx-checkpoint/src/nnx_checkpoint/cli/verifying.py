"""``nnx ckpt verify``: every byte of our own format, and what can be checked of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnx_checkpoint.cli.output import print_json, print_note, print_table, print_text
from nnx_checkpoint.cli.progress import byte_progress
from nnx_checkpoint.source import is_checkpoint
from nnx_checkpoint.verification import Damage, verify

__all__ = ["run"]


def run(path: str, *, weights_only: bool, as_json: bool) -> int:
    """Print all damage; 1 if there is any."""
    if is_checkpoint(path):
        with byte_progress("verifying") as progress:
            damage = verify(path, progress=progress)
        checked: dict[str, Any] = {"format": "nnx", "checksums": True}
        praise = "every byte is as it was written."
    else:
        from nnx_checkpoint.verification import check_structure

        with byte_progress("checking") as progress:
            found = check_structure(path, weights_only=weights_only, progress=progress)
        damage = found.damage
        checked = {
            "format": found.format,
            "checksums": False,
            "files": found.files,
            "tensors": found.tensors,
            "archives": found.archives,
        }
        praise = (
            f"no damage found. Format {found.format!r} has no checksums of its own. Checked: it opens, "
            f"{found.tensors} tensors lie inside their files, and {found.archives} of {found.files} files "
            "are zip archives whose CRC-32 sums match."
        )
    _report(path, damage, checked, praise, as_json=as_json)
    return 1 if damage else 0


def _report(
    path: str, damage: Sequence[Damage], checked: dict[str, Any], praise: str, *, as_json: bool
) -> None:
    if as_json:
        rows = [
            {"file": found.file, "start": found.start, "stop": found.stop, "problem": found.problem}
            for found in damage
        ]
        print_json({"path": path, "whole": not damage, **checked, "damage": rows})
    elif damage:
        print_table(
            ("file", "bytes", "problem"),
            [(found.file, f"{found.start}-{found.stop}", found.problem) for found in damage],
        )
        print_note(f"{len(damage)} damaged place(s): restore them from a backup, or use another checkpoint.")
    else:
        print_text(f"{path}: {praise}")
