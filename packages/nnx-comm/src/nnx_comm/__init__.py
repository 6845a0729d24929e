"""Train over slow links: fewer bytes in each step, or fewer exchanges.

Importing this package does not import torch; `QAdam` does so at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx_comm.options import (
    AsyncOptions,
    BaguaOptions,
    CodecOptions,
    DecentralizedOptions,
    DiLoCoOptions,
    LocalSGDOptions,
    LowPrecisionOptions,
    PowerSGDOptions,
)

if TYPE_CHECKING:
    from nnx_comm.qadam import QAdam

__all__ = [
    "AsyncOptions",
    "BaguaOptions",
    "CodecOptions",
    "DecentralizedOptions",
    "DiLoCoOptions",
    "LocalSGDOptions",
    "LowPrecisionOptions",
    "PowerSGDOptions",
    "QAdam",
]


def __getattr__(name: str) -> Any:
    if name == "QAdam":
        from nnx_comm.qadam import QAdam

        return QAdam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
