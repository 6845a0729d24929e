"""Offload models to host memory in chunks, for PyTorch Lightning, as an nnx plugin.

A plan within your memory limits keeps each layer's weights, masters and optimizer state on the device or in
host memory. `nnx_colossalai.backend` is the engine. Importing this package imports neither torch nor
Lightning; the classes with lightning-colossalai's names import them on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nnx_colossalai.options import ColossalAIOptions

if TYPE_CHECKING:
    from nnx_colossalai.loss_scale import ColossalAIPrecision
    from nnx_colossalai.optimizers import CPUAdam, FusedAdam, HybridAdam
    from nnx_colossalai.strategy import ColossalAIStrategy

__all__ = [
    "CPUAdam",
    "ColossalAIOptions",
    "ColossalAIPrecision",
    "ColossalAIStrategy",
    "FusedAdam",
    "HybridAdam",
]

_HOMES = {
    "CPUAdam": "nnx_colossalai.optimizers",
    "ColossalAIPrecision": "nnx_colossalai.loss_scale",
    "ColossalAIStrategy": "nnx_colossalai.strategy",
    "FusedAdam": "nnx_colossalai.optimizers",
    "HybridAdam": "nnx_colossalai.optimizers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
