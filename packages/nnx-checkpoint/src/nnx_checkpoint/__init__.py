"""Save and load one checkpoint format under every strategy and world size.

`docs/checkpoint-format.md` specifies the format. Importing this package does not import torch, so that the
command line can inspect and verify checkpoints without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_checkpoint.conversion.comparison import Comparison, compare
    from nnx_checkpoint.conversion.convert import convert, merge
    from nnx_checkpoint.foreign.contents import Contents
    from nnx_checkpoint.foreign.dcp import Handle, Reader, Writer
    from nnx_checkpoint.format.codec import EnumName
    from nnx_checkpoint.format.index import TensorEntry
    from nnx_checkpoint.format.inflight import PendingSave
    from nnx_checkpoint.format.manifest import Manifest
    from nnx_checkpoint.format.source import is_checkpoint
    from nnx_checkpoint.loop import load, save
    from nnx_checkpoint.reading.formats import CheckpointFormat, find_format, open_checkpoint
    from nnx_checkpoint.reading.native import NativeCheckpoint, open_native
    from nnx_checkpoint.reading.reader import Checkpoint
    from nnx_checkpoint.reading.verification import Damage, verify
    from nnx_checkpoint.writing.background import save_async
    from nnx_checkpoint.writing.collecting import collect_garbage
    from nnx_checkpoint.writing.request import SaveRequest

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
    "SaveRequest",
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
    "Checkpoint": "reading.reader",
    "CheckpointFormat": "reading.formats",
    "Comparison": "conversion.comparison",
    "Contents": "foreign.contents",
    "Damage": "reading.verification",
    "EnumName": "format.codec",
    "Handle": "foreign.dcp",
    "Manifest": "format.manifest",
    "NativeCheckpoint": "reading.native",
    "PendingSave": "format.inflight",
    "Reader": "foreign.dcp",
    "SaveRequest": "writing.request",
    "TensorEntry": "format.index",
    "Writer": "foreign.dcp",
    "collect_garbage": "writing.collecting",
    "compare": "conversion.comparison",
    "convert": "conversion.convert",
    "find_format": "reading.formats",
    "is_checkpoint": "format.source",
    "merge": "conversion.convert",
    "open_checkpoint": "reading.formats",
    "open_native": "reading.native",
    "load": "loop",
    "save": "loop",
    "save_async": "writing.background",
    "verify": "reading.verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"nnx_checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
