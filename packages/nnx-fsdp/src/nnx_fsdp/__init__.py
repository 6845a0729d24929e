"""Fully sharded data parallel (FSDP2) for PyTorch Lightning, as an nnx plugin.

Importing this package imports neither torch nor Lightning; `nnx_fsdp.backend` is the engine.
"""

from __future__ import annotations

from nnx_fsdp.options import FSDPOptions, MixedPrecision

__all__ = ["FSDPOptions", "MixedPrecision"]
