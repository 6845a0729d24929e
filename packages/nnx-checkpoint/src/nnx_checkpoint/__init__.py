"""One checkpoint format for every strategy: written by all ranks, read at any world size.

`docs/checkpoint-format.md` specifies the format. Importing this package is light: torch is loaded only
by what needs it, so that the command line can inspect and verify without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_checkpoint.codec import EnumName
    from nnx_checkpoint.comparison import Comparison, compare
    from nnx_checkpoint.conversion import convert, merge
    from nnx_checkpoint.dcp import Handle, Reader, Writer
    from nnx_checkpoint.foreign.contents import Contents
    from nnx_checkpoint.formats import CheckpointFormat, find_format, open_checkpoint
    from nnx_checkpoint.index import TensorEntry
    from nnx_checkpoint.inflight import PendingSave
    from nnx_checkpoint.loop import load, save
    from nnx_checkpoint.manifest import Manifest
    from nnx_checkpoint.reader import Checkpoint, NativeCheckpoint, open_native
    from nnx_checkpoint.source import is_checkpoint
    from nnx_checkpoint.transaction import collect_garbage
    from nnx_checkpoint.verification import Damage, verify
    from nnx_checkpoint.writer import save_async

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
    "load",
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
    "collect_garbage": "transaction",
    "compare": "comparison",
    "convert": "conversion",
    "find_format": "formats",
    "is_checkpoint": "source",
    "merge": "conversion",
    "open_checkpoint": "formats",
    "open_native": "reader",
    "load": "loop",
    "save": "loop",
    "save_async": "writer",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"nnx_checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
