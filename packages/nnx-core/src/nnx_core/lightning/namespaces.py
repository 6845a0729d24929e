"""The four module trees a strategy can be built for, and what each calls its parts."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from nnx_core.errors import OptionError


@dataclass(frozen=True, slots=True)
class Namespace:
    """One of Lightning's module trees.

    Attributes:
        name: The tree's root, such as ``lightning.pytorch``.
        is_fabric: True if its strategies serve Fabric rather than Trainer.
        adapter: Module of nnx that holds the strategy class for this tree.
    """

    name: str
    is_fabric: bool
    adapter: str

    def strategy_class(self) -> Any:
        """The adapter class for this tree; imports Lightning."""
        return importlib.import_module(self.adapter).NnxStrategy

    def base_class(self) -> Any:
        """Lightning's own base class of strategies in this tree."""
        return importlib.import_module(f"{self.name}.strategies").Strategy


NAMESPACES = {
    space.name: space
    for space in (
        Namespace("lightning.pytorch", False, "nnx_core.lightning.strategies_lightning_pytorch"),
        Namespace("pytorch_lightning", False, "nnx_core.lightning.strategies_pytorch_lightning"),
        Namespace("lightning.fabric", True, "nnx_core.lightning.strategies_lightning_fabric"),
        Namespace("lightning_fabric", True, "nnx_core.lightning.strategies_lightning_fabric_mirror"),
    )
}


def get_namespace(name: str) -> Namespace:
    """Look a namespace up.

    Raises:
        OptionError: There is no such tree.

    Example:
        >>> get_namespace("lightning.fabric").is_fabric
        True
    """
    if name not in NAMESPACES:
        raise OptionError(f"namespace={name!r} is unknown.", remedy=f"Use one of {', '.join(NAMESPACES)}.")
    return NAMESPACES[name]


def trainer_tree() -> str:
    """Root of the copy of Lightning whose Trainer this process uses: the first that is imported."""
    roots = [space.name for space in NAMESPACES.values() if not space.is_fabric]
    return next((root for root in roots if f"{root}.strategies" in sys.modules), roots[0])


@cache
def strategy_class_of(cls: type, root: str) -> type:
    """A class that builds a strategy with arguments of its own, as a strategy for one tree.

    Args:
        cls: Calls ``super().__init__`` with what the tree's strategy class takes.
        root: Name of the tree; see `trainer_tree`.
    """
    bases = (cls, get_namespace(root).strategy_class())
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
