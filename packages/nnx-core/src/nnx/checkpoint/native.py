"""Our own format as a `CheckpointFormat`."""

from __future__ import annotations

import os

from typing_extensions import override

from nnx.checkpoint.formats import CheckpointFormat
from nnx.checkpoint.opened import Checkpoint
from nnx.checkpoint.reading import open_native
from nnx.checkpoint.source import is_checkpoint

__all__ = ["Native"]


class Native(CheckpointFormat):
    """The shared checkpoint directory."""

    name = "nnx"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return is_checkpoint(path)

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        return open_native(path, weights_only=weights_only)
