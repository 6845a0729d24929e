"""One checkpoint format for every strategy: written by all ranks, read at any world size.

`docs/checkpoint-format.md` specifies the format. Importing this package is light: torch is loaded only
by what needs it, so that the command line can inspect and verify without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.checkpoint.codec import EnumName
    from nnx.checkpoint.comparison import Comparison, compare
    from nnx.checkpoint.conversion import convert, merge
    from nnx.checkpoint.dcp import Handle, Reader, Writer
    from nnx.checkpoint.foreign.contents import Contents
    from nnx.checkpoint.formats import CheckpointFormat, find_format, open_checkpoint
    from nnx.checkpoint.garbage import collect_garbage
    from nnx.checkpoint.index import TensorEntry
    from nnx.checkpoint.inflight import PendingSave
    from nnx.checkpoint.manifest import Manifest
    from nnx.checkpoint.reader import Checkpoint, NativeCheckpoint, open_native
    from nnx.checkpoint.source import is_checkpoint
    from nnx.checkpoint.verification import Damage, verify
    from nnx.checkpoint.writer import save, save_async

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "Comparison",
    "Contents",
    "Damage",
    "EnumName",
    "Handle",
    "Manifest",
    "NativeCheckpoint",
    "PendingSave",
    "Reader",
    "TensorEntry",
    "Writer",
    "collect_garbage",
    "compare",
    "convert",
    "find_format",
    "is_checkpoint",
    "merge",
    "open_checkpoint",
    "open_native",
    "save",
    "save_async",
    "verify",
]

_HOME = {
    "Checkpoint": "reader",
    "CheckpointFormat": "formats",
    "Comparison": "comparison",
    "Contents": "foreign.contents",
    "Damage": "verification",
    "EnumName": "codec",
    "Handle": "dcp",
    "Manifest": "manifest",
    "NativeCheckpoint": "reader",
    "PendingSave": "inflight",
    "Reader": "dcp",
    "TensorEntry": "index",
    "Writer": "dcp",
    "collect_garbage": "garbage",
    "compare": "comparison",
    "convert": "conversion",
    "find_format": "formats",
    "is_checkpoint": "source",
    "merge": "conversion",
    "open_checkpoint": "formats",
    "open_native": "reader",
    "save": "writer",
    "save_async": "writer",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"nnx.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
