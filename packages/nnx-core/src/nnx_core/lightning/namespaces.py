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


@dataclass(frozen=True, slots=True)
class Namespace:
    """One of Lightning's module trees.

    Attributes:
        name: The tree's root, such as ``lightning.pytorch``.
        is_fabric: True if its strategies serve Fabric rather than Trainer.
        strategy: The name of the strategy class for this tree, in this module.
    """

    name: str
    is_fabric: bool
    strategy: str

    def strategy_class(self) -> Any:
        """Return the adapter class for this tree; imports Lightning."""
        return getattr(sys.modules[__name__], self.strategy)

    def base_class(self) -> Any:
        """Return Lightning's own base class of strategies in this tree."""
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
    """Return the root of the copy of Lightning whose Trainer is in use: the first imported one."""
    roots = [space.name for space in NAMESPACES.values() if not space.is_fabric]
    return next((root for root in roots if f"{root}.strategies" in sys.modules), roots[0])


# The strategy class of a tree inherits from the adapter and from the tree's own base class, so it needs that
# copy of Lightning. It is made at the first look-up of its name in this module. A spawned process finds it in
# the same way, because pickle refers to a class by module and name.


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
    """Base class of a strategy with a name and arguments of its own, for the Trainer in use.

    An instance of a subclass is also one of nnx's strategy class; its constructor ends with `_build`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance of this class and of nnx's strategy class for the Trainer in use."""
        made = _strategy_class_of(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("Self", object.__new__(made))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the named class: another process makes the class for the same tree again."""
        own: Any = self
        return _empty_strategy, (type(self).__bases__[0], own.root), own.__getstate__()

    def _build(self, backend: type[Any], name: str, given: dict[str, Any], **lightning: Any) -> None:
        """Make the backend, and initialize its strategy.

        Args:
            backend: The class of the backend.
            name: The name of the strategy.
            given: Options of the backend, and common options of nnx's strategies.
            **lightning: Arguments of Lightning's own strategies.
        """
        common, own = split_options(given, owner=name, schemas=(CommonOptions, backend.Options))
        cast("Any", super()).__init__(
            backend(backend.Options(**own)), name=name, common=CommonOptions(**common), **lightning
        )


def _empty_strategy(cls: type, root: str) -> Any:
    return object.__new__(_strategy_class_of(cls, root))


@cache
def _strategy_class_of(cls: type, root: str) -> type:
    """Return a class that inherits from a class with its own arguments, and from a tree's strategy class."""
    bases = (cls, get_namespace(root).strategy_class())
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
