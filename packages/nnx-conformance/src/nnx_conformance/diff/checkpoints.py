"""Compare two checkpoints as ``nnx ckpt diff`` does, and say how the first weight differs."""

from __future__ import annotations

from typing import Any

from nnx_checkpoint.cli.output import print_text
from nnx_checkpoint.cli.verification import run_diff
from nnx_checkpoint.reading.formats import open_checkpoint
from nnx_conformance.diff.verdict import CAUSES, relation_of

_READ = 1 << 26
"""The most elements of a tensor that is read whole for its relation."""


def compare_checkpoints(left: str, right: str, *, as_json: bool) -> int:
    """Print the differences of two checkpoints; return 1 if there are any."""
    code = run_diff(left, right, values=True, only_weights=False, weights_only=True, as_json=as_json)
    if code and not as_json:
        print_text(describe_first(open_checkpoint(left), open_checkpoint(right)))
    return code


def describe_first(left: Any, right: Any) -> str:
    """Return a sentence about the first weight that differs, in the order of the first checkpoint."""
    for name in left.tensors:
        if not name.startswith("model.") or name not in right.tensors:
            continue
        entry, other = left.entry(name), right.entry(name)
        if entry.shape != other.shape or entry.numel > _READ:
            continue
        x, y = left.read(name), right.read(name)
        if x.dtype == y.dtype and bool((x == y).all()):
            continue
        found, shown = relation_of(x, y), name.removeprefix("model.")
        if found is None:
            distance = float((x.double() - y.double()).norm() / (x.double().norm() or 1.0))
            return f"First weight that differs: {shown}, by {distance:.2g} of its norm."
        where = f" Look at {CAUSES[found.kind][1]}." if found.kind in CAUSES else ""
        return f"First weight that differs: {shown}, which {found.words} in {right.path}.{where}"
    return "No weight differs that both checkpoints have."
