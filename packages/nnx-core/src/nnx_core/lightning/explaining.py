"""Better errors from Lightning for names it does not know, without patching its functions.

Lightning's Trainer and Fabric ask their registry for the list of names, and test whether the user's
``strategy=`` is in it. To them, and to nobody else, the registry hands a list that explains itself when
something is missing; every other caller gets a plain list.
"""

from __future__ import annotations

import sys
from typing import Any

from nnx_core.errors import NnxError, StrategyNotFoundError
from nnx_core.lightning.namespaces import NAMESPACES, Namespace
from nnx_core.registry import StrategyRegistry

__all__ = ["ExplainingList", "available_strategies"]

# The modules whose connector validates `strategy=`, as of Lightning 2.6.6. Where one is renamed,
# Lightning's own message comes back; a test notices.
_CONNECTORS = frozenset(
    {
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "lightning.fabric.connector",
        "pytorch_lightning.trainer.connectors.accelerator_connector",
        "lightning_fabric.connector",
    }
)


def available_strategies(registry: Any, space: Namespace) -> list[str]:
    """What `registry.available_strategies()` returns, once nnx has filled the registry."""
    asker = sys._getframe(1).f_globals.get("__name__")
    return ExplainingList(registry, space.name) if asker in _CONNECTORS else list(registry)


class ExplainingList(list[str]):
    """The names of a registry; testing for one that it lacks raises an error that says what to do.

    Lightning's own text begins the message, and it stays a ValueError, except that a missing package
    is an ImportError.
    """

    def __init__(self, names: Any = (), namespace: str = "lightning.pytorch") -> None:
        super().__init__(names)
        self.namespace = namespace

    def __contains__(self, value: object) -> bool:
        if super().__contains__(value):
            return True
        error = self._explain(value)
        if error is not None:
            prefix = f"You selected an invalid strategy name: `strategy={value!r}`."
            message = f"{error.message[0].upper()}{error.message[1:]}"
            raise type(error)(f"{prefix} {message}", remedy=error.remedy)
        return False

    def _explain(self, value: object) -> NnxError | None:
        space = NAMESPACES[self.namespace]
        if not isinstance(value, str):
            return _explain_foreign(value, space)
        if value in StrategyRegistry:
            mine, other = ("Fabric", "Trainer") if space.is_fabric else ("Trainer", "Fabric")
            return StrategyNotFoundError(
                f"the strategy {value!r} does not support {mine}.", remedy=f"Use it with {other}."
            )
        # Lightning has lower-cased the user's string, so it cannot find such a name.
        for name in self:
            if name.lower() == value:
                return StrategyNotFoundError(
                    f"it is registered as {name!r}, but Lightning looks names up in lower case.",
                    remedy=f"Register it as {value!r}.",
                )
        return StrategyRegistry.explain(value, also_known=tuple(self))


def _explain_foreign(value: object, space: Namespace) -> NnxError | None:
    """A strategy object of another of Lightning's trees than the one that asks."""
    bases = {name: _base_class(name) for name in NAMESPACES}
    if isinstance(value, bases[space.name] or ()):
        return None
    for name, base in bases.items():
        if base is not None and isinstance(value, base):
            return StrategyNotFoundError(
                f"it is a strategy of {name}, and this is {space.name}: each has its own classes.",
                remedy=f"Import it from {space.name}, or call nnx.strategy(..., namespace={space.name!r}).",
            )
    return None


def _base_class(namespace: str) -> Any:
    return getattr(sys.modules.get(f"{namespace}.strategies"), "Strategy", None)
