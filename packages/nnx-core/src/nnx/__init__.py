"""nnx: every way of distributing a model as one string for Trainer and Fabric.

Importing this package is light: no torch, no Lightning. It makes every installed strategy known to
Lightning, as ``import torch`` does by itself where nnx-core is installed; see `_nnx_autoload`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import _nnx_autoload

if TYPE_CHECKING:
    from nnx.backend import Backend, ParallelContext
    from nnx.errors import (
        CheckpointError,
        NnxError,
        OptionError,
        PlanError,
        PluginError,
        StrategyNotFoundError,
        StrategyNotInstalledError,
        UnsupportedError,
    )
    from nnx.lightning.checkpoint_io import CheckpointIO
    from nnx.lightning.factory import strategy
    from nnx.lightning.loading import load_from_checkpoint
    from nnx.lightning.rank_comparison import compare_ranks
    from nnx.lite import LightningLite, Lite
    from nnx.plugins.hookspecs import hookimpl
    from nnx.random_state import RandomState
    from nnx.registry import StrategyRegistry
    from nnx.spec import Capabilities, CheckpointFormatSpec, StrategySpec

    __version__: str

__all__ = [
    "Capabilities",
    "CheckpointFormatSpec",
    "StrategySpec",
    "hookimpl",
    "StrategyRegistry",
    "strategy",
    "Backend",
    "ParallelContext",
    "CheckpointIO",
    "RandomState",
    "load_from_checkpoint",
    "compare_ranks",
    "Lite",
    "LightningLite",
    "NnxError",
    "CheckpointError",
    "OptionError",
    "PlanError",
    "PluginError",
    "StrategyNotFoundError",
    "StrategyNotInstalledError",
    "UnsupportedError",
    "__version__",
]

_HOME = {
    "Capabilities": "nnx.spec",
    "CheckpointFormatSpec": "nnx.spec",
    "StrategySpec": "nnx.spec",
    "hookimpl": "nnx.plugins.hookspecs",
    "StrategyRegistry": "nnx.registry",
    "strategy": "nnx.lightning.factory",
    "Backend": "nnx.backend",
    "ParallelContext": "nnx.backend",
    "CheckpointIO": "nnx.lightning.checkpoint_io",
    "RandomState": "nnx.random_state",
    "load_from_checkpoint": "nnx.lightning.loading",
    "compare_ranks": "nnx.lightning.rank_comparison",
    "Lite": "nnx.lite",
    "LightningLite": "nnx.lite",
    "NnxError": "nnx.errors",
    "CheckpointError": "nnx.errors",
    "OptionError": "nnx.errors",
    "PlanError": "nnx.errors",
    "PluginError": "nnx.errors",
    "StrategyNotFoundError": "nnx.errors",
    "StrategyNotInstalledError": "nnx.errors",
    "UnsupportedError": "nnx.errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nnx-core")
    if name not in _HOME:
        raise AttributeError(f"module 'nnx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_nnx_autoload.install()
