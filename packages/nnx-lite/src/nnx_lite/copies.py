"""Which copy of Fabric Lite is built on, and which of Lightning's copies an object comes from.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``, and each
has its own classes. Old scripts mix them. This module tells them apart; it translates nothing.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from nnx_core.lightning.namespaces import NAMESPACES

__all__ = ["FABRIC_ROOT", "base_of", "fabric_module", "is_from_lightning", "root_of"]


def _fabric_root() -> str:
    """The copy that is imported already, or else installed; ``lightning`` where both are."""
    imported = [root for root in ("lightning.fabric", "lightning_fabric") if root in sys.modules]
    if imported:
        return imported[0]
    return "lightning.fabric" if find_spec("lightning") else "lightning_fabric"


FABRIC_ROOT = _fabric_root()
"""Root of the copy of Fabric that Lite inherits from in this process."""


def fabric_module(name: str = "") -> Any:
    """A module of the Fabric in use, such as ``plugins``."""
    return importlib.import_module(f"{FABRIC_ROOT}.{name}" if name else FABRIC_ROOT)


def root_of(value: object, path: str, name: str) -> str | None:
    """The tree whose class `name` in module `path` this is an instance of; Trainer's before Fabric's.

    Trainer's precision and accelerator classes inherit from Fabric's, so that the order matters.
    """
    for root in NAMESPACES:
        base = base_of(root, path, name)
        if base is not None and isinstance(value, base):
            return root
    return None


def base_of(root: str, path: str, name: str) -> Any:
    """A class of a tree if its module is imported; else nothing can be an instance of it."""
    return getattr(sys.modules.get(f"{root}.{path}"), name, None)


def is_from_lightning(value: object) -> bool:
    """Return True if its class is Lightning's own, and not a subclass that somebody wrote."""
    return type(value).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
