"""Dicts that a program saved with ``torch.save``, one file for each rank: where their tensors are, safely."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx.checkpoint.foreign.torch_file import load_torch_file
from nnx.errors import CheckpointError

__all__ = ["load_rank_file"]


def load_rank_file(
    path: Path, *, weights_only: bool, own: Collection[str], inert: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a rank's file; its tensors stay in it, even if the rest has to be trusted.

    Args:
        path: The file.
        weights_only: False trusts what is under other keys than `own`, where it cannot be read safely.
        own: The keys of the program that wrote it. What is under them is never trusted, nor need be.
        inert: Prefixes of the names of the program's own classes.

    Raises:
        CheckpointError: The file is missing or damaged, is no dict, or needs trust.
    """
    try:
        loaded = load_torch_file(path, inert=inert)
    except CheckpointError:
        if weights_only:
            raise
        located = load_torch_file(path, inert=("",))
        trusted = load_torch_file(path, weights_only=False)
        loaded = {key: located[key] if key in own else value for key, value in trusted.items()}
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"'{path}' holds a {type(loaded).__name__}, expected the dict of one rank.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return dict(loaded)
