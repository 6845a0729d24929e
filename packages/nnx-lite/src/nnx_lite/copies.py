"""Choose Lite's copy of Fabric, and tell Lightning's copies apart.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``, and each copy
has its own classes. Old scripts mix them. This module translates nothing.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from nnx_core.lightning.namespaces import NAMESPACES

__all__ = ["FABRIC_ROOT", "base_of", "fabric_module", "is_from_lightning", "root_of"]


def _fabric_root() -> str:
    """Return the copy that is imported, or else installed; ``lightning`` if both are."""
    imported = [root for root in ("lightning.fabric", "lightning_fabric") if root in sys.modules]
    if imported:
        return imported[0]
    return "lightning.fabric" if find_spec("lightning") else "lightning_fabric"


FABRIC_ROOT = _fabric_root()
"""The root of the copy of Fabric that Lite inherits from in this process."""


def fabric_module(name: str = "") -> Any:
    """Return a module of the Fabric in use, such as ``plugins``."""
    return importlib.import_module(f"{FABRIC_ROOT}.{name}" if name else FABRIC_ROOT)


def root_of(value: object, path: str, name: str) -> str | None:
    """Return the tree with class `name` in module `path` that a value is an instance of.

    Trainer's tree comes before Fabric's, because Trainer's precision and accelerator classes inherit from
    Fabric's.
    """
    for root in NAMESPACES:
        base = base_of(root, path, name)
        if base is not None and isinstance(value, base):
            return root
    return None


def base_of(root: str, path: str, name: str) -> Any:
    """Return a class of a tree if its module is imported; else no object can be its instance."""
    return getattr(sys.modules.get(f"{root}.{path}"), name, None)


def is_from_lightning(value: object) -> bool:
    """Return True if a value's class is Lightning's own, not a user's subclass."""
    return type(value).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
