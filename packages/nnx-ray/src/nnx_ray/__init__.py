"""Run every nnx strategy on a Ray cluster, started from a plain script.

`launcher` holds the launcher behind `nnx.strategy(..., launcher="ray")`. `cluster` holds the connection to
the cluster and its workers, and `actors` the code that runs in Ray's actors. Importing this package imports
neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_ray.launcher import RayLauncher
    from nnx_ray.options import RayOptions

__all__ = ["RayLauncher", "RayOptions"]

_HOME = {"RayLauncher": "nnx_ray.launcher", "RayOptions": "nnx_ray.options"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nnx_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
