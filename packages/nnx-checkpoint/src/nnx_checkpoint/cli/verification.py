"""Run ``nnx ckpt verify`` and ``nnx ckpt diff``: find damage, and compare two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import NotRequired, TypedDict

from nnx_checkpoint.cli.content import kind_of, natural_order
from nnx_checkpoint.cli.output import (
    byte_progress,
    human_bytes,
    print_json,
    print_note,
    print_table,
    print_text,
)
from nnx_checkpoint.format.source import is_checkpoint
from nnx_checkpoint.reading.verification import Damage, verify

if TYPE_CHECKING:
    from nnx_checkpoint.conversion.comparison import Comparison, TensorDifference


# ``nnx ckpt verify``: check every byte of our own format, and the structure of others.


class Verification(TypedDict):
    """The output of ``nnx ckpt verify --json``.

    Attributes:
        checksums: True if the format has checksums of its own.
        archives: The number of files that are zip archives, whose sums were checked.
    """

    path: str
    whole: bool
    format: str
    checksums: bool
    files: NotRequired[int]
    tensors: NotRequired[int]
    archives: NotRequired[int]
    damage: list[Damage]


def run_verify(path: str, *, weights_only: bool, as_json: bool) -> int:
    """Print all damage; return exit code 1 if there is any."""
    if is_checkpoint(path):
        with byte_progress("verifying") as progress:
            damage = verify(path, progress=progress)
        checked: Verification = {
            "path": path,
            "whole": not damage,
            "format": "nnx",
            "checksums": True,
            "damage": damage,
        }
        success = "OK: all checksums match."
    else:
        from nnx_checkpoint.reading.verification import check_structure

        with byte_progress("checking") as progress:
            found = check_structure(path, weights_only=weights_only, progress=progress)
        damage = found.damage
        checked = {
            "path": path,
            "whole": not damage,
            "format": found.format,
            "checksums": False,
            "files": found.files,
            "tensors": found.tensors,
            "archives": found.archives,
            "damage": damage,
        }
        success = (
            f"no damage found. Format {found.format!r} has no checksums of its own. Checked: it opens, "
            f"{found.tensors} tensors lie inside their files, and {found.archives} of {found.files} files "
            "are zip archives whose CRC-32 sums match."
        )
    if as_json:
        print_json(checked)
    else:
        _report(path, damage, success)
    return 1 if damage else 0


def _report(path: str, damage: Sequence[Damage], success: str) -> None:
    if damage:
        print_table(
            ("file", "bytes", "problem"),
            [(found.file, f"{found.start}-{found.stop}", found.problem) for found in damage],
        )
        print_note(f"{len(damage)} damaged range(s): restore from a backup, or use another checkpoint.")
    else:
        print_text(f"{path}: {success}")


# ``nnx ckpt diff``: print the differences between two checkpoints of any format.


_ROWS = 20
"""The most lines shown of each kind of difference."""


class Pair(TypedDict):
    """The differing values of a tensor's property on both sides."""

    name: str
    left: str
    right: str


class Shapes(TypedDict):
    """The shapes of a tensor on both sides."""

    name: str
    left: list[int]
    right: list[int]


class ObjectPair(TypedDict):
    """An object that differs."""

    place: str
    left: str
    right: str


class Values(TypedDict):
    """A tensor with different values.

    Attributes:
        elements: The number of elements that differ.
        numel: The number of all elements.
        largest: The largest difference; nan and inf as text.
    """

    name: str
    elements: int
    numel: int
    largest: float | str


class Differences(TypedDict):
    """The output of ``nnx ckpt diff --json``.

    Attributes:
        ties: The names that are tied on one side only.
    """

    left: str
    right: str
    same: bool
    only_left: list[str]
    only_right: list[str]
    shapes: list[Shapes]
    dtypes: list[Pair]
    ties: list[str]
    objects: list[ObjectPair]
    values: list[Values]
    values_compared: bool
    tensors_compared: int
    bytes_compared: int


def run_diff(
    left: str, right: str, *, values: bool, only_weights: bool, weights_only: bool, as_json: bool
) -> int:
    """Print the differences; return exit code 1 if there are any."""
    from nnx_checkpoint.conversion.comparison import compare
    from nnx_checkpoint.reading.formats import open_checkpoint

    opened = [open_checkpoint(path, weights_only=weights_only) for path in (left, right)]
    with byte_progress("comparing") as progress:
        found = compare(*opened, values=values, only_weights=only_weights, progress=progress)
    if as_json:
        print_json(_as_json(found, left, right, values=values))
    else:
        _print(found, left, right, values=values)
    return 0 if found.same else 1


def _as_json(found: Comparison, left: str, right: str, *, values: bool) -> Differences:
    return {
        "left": left,
        "right": right,
        "same": found.same,
        "only_left": found.only_left,
        "only_right": found.only_right,
        "shapes": [{"name": name, "left": list(a), "right": list(b)} for name, a, b in found.shapes],
        "dtypes": [{"name": name, "left": a, "right": b} for name, a, b in found.dtypes],
        "ties": found.ties,
        "objects": [{"place": o.place, "left": o.left, "right": o.right} for o in found.objects],
        "values": [
            {
                "name": tensor.name,
                "elements": tensor.elements,
                "numel": tensor.numel,
                "largest": tensor.largest if math.isfinite(tensor.largest) else str(tensor.largest),
            }
            for tensor in found.values
        ],
        "values_compared": values,
        "tensors_compared": found.compared,
        "bytes_compared": found.bytes_compared,
    }


def _print(found: Comparison, left: str, right: str, *, values: bool) -> None:
    _table(f"only in {left}", ("name",), [(name,) for name in found.only_left])
    _table(f"only in {right}", ("name",), [(name,) for name in found.only_right])
    shapes = [(name, _shape(left), _shape(right)) for name, left, right in found.shapes]
    _table("different shapes", ("name", "left", "right"), shapes)
    _table("different element types", ("name", "left", "right"), found.dtypes)
    _table("tied on one side only", ("name",), [(name,) for name in found.ties])
    objects = [(item.place, item.left, item.right) for item in found.objects]
    _table("different objects", ("place", "left", "right"), objects)
    _table("different values", ("kind", "tensors", "largest difference"), _by_kind(found.values))
    _table(
        "tensors with different values",
        ("name", "elements that differ", "largest difference"),
        [
            (tensor.name, f"{tensor.elements:,} of {tensor.numel:,}", f"{tensor.largest:.3g}")
            for tensor in sorted(found.values, key=lambda tensor: natural_order(tensor.name))
        ],
    )
    compared = f"{found.compared} tensors compared bitwise ({human_bytes(found.bytes_compared)})"
    if not values:
        compared = "values were not compared"
    if found.same:
        print_text(f"Equal; {compared}.")
        return
    counts = {
        "names on one side only": len(found.only_left) + len(found.only_right),
        "shapes or element types": len(found.shapes) + len(found.dtypes),
        "ties": len(found.ties),
        "objects": len(found.objects),
        "tensors by value": len(found.values),
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    print_text(f"Different: {shown}; {compared}.")


def _by_kind(values: Sequence[TensorDifference]) -> list[tuple[str, str, str]]:
    """Return for each kind of tensor the number of differing tensors and the largest difference."""
    kinds: dict[str, list[float]] = {}
    for tensor in values:
        kinds.setdefault(kind_of(tensor.name), []).append(tensor.largest)
    return [(kind, str(len(found)), f"{_largest(found):.3g}") for kind, found in sorted(kinds.items())]


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if any is NaN."""
    return next((value for value in values if math.isnan(value)), max(values))


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    print_text(f"{title}:")
    print_table(header, rows[:_ROWS])
    if len(rows) > _ROWS:
        print_note(f"... and {len(rows) - _ROWS} more; --json lists all of them.")
    print_text("")
