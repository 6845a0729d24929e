"""nnx-core: every way of distributing a model as one string for Trainer and Fabric.

Importing this package is light: no torch, no Lightning. It makes every installed strategy known to
Lightning, as ``import torch`` does by itself where nnx-core is installed; see `_nnx_autoload`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import _nnx_autoload

_HOME = {
    "Capabilities": "nnx_core.names.spec",
    "CheckpointFormatSpec": "nnx_core.names.spec",
    "LauncherSpec": "nnx_core.names.spec",
    "StrategySpec": "nnx_core.names.spec",
    "hookimpl": "nnx_core.names.plugins",
    "StrategyRegistry": "nnx_core.names.registry",
    "strategy": "nnx_core.lightning.factory",
    "Backend": "nnx_core.backend",
    "ParallelContext": "nnx_core.backend",
    "CheckpointIO": "nnx_core.lightning.checkpoint",
    "RandomState": "nnx_core.random_state",
    "load_from_checkpoint": "nnx_core.lightning.loading",
    "compare_ranks": "nnx_core.lightning.callbacks",
    "plan": "nnx_core.planning.planner",
    "record": "nnx_conformance.diff.loop",
    "Lite": "nnx_lite",
    "LightningLite": "nnx_lite",
    "NnxError": "nnx_core.errors",
    "CheckpointError": "nnx_core.errors",
    "OptionError": "nnx_core.errors",
    "PlanError": "nnx_core.errors",
    "PluginError": "nnx_core.errors",
    "StrategyNotFoundError": "nnx_core.errors",
    "StrategyNotInstalledError": "nnx_core.errors",
    "UnsupportedError": "nnx_core.errors",
}
"""The module of each public name; `__init__.pyi` has the same for type checkers."""

_OPTIONAL = {"nnx_lite": "nnx-lite", "nnx_conformance": "nnx-conformance"}
"""The distribution of each module in `_HOME` that may be absent."""


def _is_absent(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _OPTIONAL and find_spec(root) is None


# Without names that raise: `from nnx import *` reads each of them.
__all__ = [*(name for name, home in _HOME.items() if not _is_absent(home)), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nnx-core")
    if name not in _HOME:
        raise AttributeError(f"module 'nnx_core' has no attribute {name!r}")
    if _is_absent(_HOME[name]):
        raise _not_installed(name, _OPTIONAL[_HOME[name].partition(".")[0]])
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _not_installed(name: str, package: str) -> ImportError:
    from nnx_core.errors import PackageNotInstalledError

    return PackageNotInstalledError(
        f"nnx.{name} is in the package {package}, which is not installed.",
        remedy=f"Run `pip install {package}`, or in a clone of nnx `pip install packages/{package}`.",
    )


def __dir__() -> list[str]:
    return sorted(__all__)


_nnx_autoload.install()
