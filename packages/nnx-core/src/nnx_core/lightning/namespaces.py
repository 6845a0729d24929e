"""The module trees of Lightning's copies: their names and their strategy classes."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from typing_extensions import Self

from nnx_core.errors import OptionError
from nnx_core.options import CommonOptions, split_options

# The four module trees a strategy can be built for, and what each calls its parts.


@dataclass(frozen=True, slots=True)
class Namespace:
    """One of Lightning's module trees.

    Attributes:
        name: The tree's root, such as ``lightning.pytorch``.
        is_fabric: True if its strategies serve Fabric rather than Trainer.
        strategy: Name of the strategy class for this tree, in this module.
    """

    name: str
    is_fabric: bool
    strategy: str

    def strategy_class(self) -> Any:
        """The adapter class for this tree; imports Lightning."""
        return getattr(sys.modules[__name__], self.strategy)

    def base_class(self) -> Any:
        """Lightning's own base class of strategies in this tree."""
        return importlib.import_module(f"{self.name}.strategies").Strategy


NAMESPACES = {
    space.name: space
    for space in (
        Namespace("lightning.pytorch", False, "NnxStrategy"),
        Namespace("pytorch_lightning", False, "NnxMirrorStrategy"),
        Namespace("lightning.fabric", True, "NnxFabricStrategy"),
        Namespace("lightning_fabric", True, "NnxMirrorFabricStrategy"),
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


# The strategy class of a tree inherits from the adapter and from the tree's own base class, so it can only be
# made where that copy of Lightning is installed. It is made when its name is first looked up in this module,
# which is also how a spawned process finds it: pickle knows a class by module and name.


def __getattr__(name: str) -> Any:
    space = next((space for space in NAMESPACES.values() if space.strategy == name), None)
    if space is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _make_strategy_class(space)
    return made


def _make_strategy_class(space: Namespace) -> type:
    strategies = importlib.import_module(f"{space.name}.strategies")
    bases: tuple[type, ...]
    if space.is_fabric:
        from nnx_core.lightning.fabric import FabricAdapter

        bases = (FabricAdapter, strategies.ParallelStrategy, strategies.strategy._Sharded)
    else:
        from nnx_core.lightning.trainer import TrainerAdapter

        bases = (TrainerAdapter, strategies.ParallelStrategy)
    text = f"A `Backend` as a strategy of ``{space.name}``; its arguments are `{bases[0].__name__}`'s."
    return type(space.strategy, bases, {"__module__": __name__, "__doc__": text, "root": space.name})


class StrategyOfTrainer:
    """The base of a strategy with a name and arguments of its own, for the Trainer whose copy is in use.

    An object of a subclass is also of nnx's strategy class for that copy; its constructor ends with `_build`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object of this class and of nnx's strategy class for the Trainer in use."""
        made = _strategy_class_of(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("Self", object.__new__(made))

    def _build(self, backend: type[Any], name: str, given: dict[str, Any], **lightning: Any) -> None:
        """Make the backend, and be its strategy.

        Args:
            backend: The class of the backend.
            name: The name of the strategy.
            given: Options of the backend, and those that all strategies of nnx have.
            **lightning: Arguments of Lightning's own strategies.
        """
        common, own = split_options(given, owner=name, schemas=(CommonOptions, backend.Options))
        cast("Any", super()).__init__(
            backend(backend.Options(**own)), name=name, common=CommonOptions(**common), **lightning
        )


@cache
def _strategy_class_of(cls: type, root: str) -> type:
    """A class of both: one with arguments of its own, and the strategy class for a tree."""
    bases = (cls, get_namespace(root).strategy_class())
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
