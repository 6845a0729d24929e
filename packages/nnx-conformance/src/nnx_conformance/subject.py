"""The strategy under test, as plain data from which workers build it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnx_core.names.spec import LIGHTNING_NAMES, Capabilities

Kind = Literal["backend", "strategy", "lightning"]
"""The kind of class behind a name: an `nnx.Backend`, a plugin's Lightning strategy, or one of Lightning."""

_UNREGISTERED = "strategy_under_test"
_LIGHTNING = Capabilities(
    precisions=("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"),
    unused_parameters=False,
    freezing_while_training=False,
)


@dataclass(frozen=True)
class Subject:
    """A strategy by name.

    Attributes:
        strategy: A registered name, one of Lightning's own, or ``"pkg.module:Class"`` of a `Backend` or
            a Lightning strategy that is not registered.
        options: Keyword arguments of the strategy.
        imports: Modules that every process imports first, such as one that registers the name.
        accelerator: The accelerator of Trainer and Fabric.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    imports: tuple[str, ...] = ()
    accelerator: str = "cpu"

    @property
    def name(self) -> str:
        """The name in the registries."""
        return _UNREGISTERED if ":" in self.strategy else self.strategy

    @property
    def is_lightning(self) -> bool:
        """True if Lightning itself provides the strategy."""
        return self.strategy in LIGHTNING_NAMES

    def prepare(self) -> None:
        """Register the name in this process."""
        import nnx_core

        for module in self.imports:
            importlib.import_module(module)
        if ":" in self.strategy:
            nnx_core.StrategyRegistry.register(_UNREGISTERED, self.strategy, override=True)

    def flag(self, namespace: str = "lightning.pytorch") -> Any:
        """Return the argument for ``strategy=``: the name, or an object if there are options.

        Args:
            namespace: Root of the Lightning package whose Trainer or Fabric gets the argument.
        """
        if not self.options:
            return self.name
        import nnx_core

        return nnx_core.strategy(self.name, namespace=namespace, **self.options)

    def identify(self) -> Identity:
        """Return the class behind the name, with its declarations. Imports the engine.

        Raises:
            NnxError: The name is unknown, or its class cannot be imported.
        """
        from nnx_core.backend import Backend
        from nnx_core.names.registry import StrategyRegistry

        self.prepare()
        if self.is_lightning:
            return Identity("lightning", _LIGHTNING, "Lightning itself", self.strategy)
        spec = StrategyRegistry.get(self.name)
        target = spec.resolve()
        is_backend = isinstance(target, type) and issubclass(target, Backend)
        return Identity(
            "backend" if is_backend else "strategy",
            spec.capabilities,
            StrategyRegistry.owner(self.name),
            spec.reference,
            dict(spec.init_params),
        )


@dataclass(frozen=True)
class Identity:
    """The class behind a name, and its declarations.

    Attributes:
        kind: A `Backend`, a plugin's Lightning strategy, or one of Lightning.
        capabilities: The declared capabilities.
        owner: The distribution that provides the strategy.
        target: The class.
        init_params: The options that the spec fixes for this name; the subject's options override them.
    """

    kind: Kind
    capabilities: Capabilities
    owner: str
    target: str
    init_params: Mapping[str, Any] = field(default_factory=dict, hash=False)


REFERENCE = Subject("auto")
"""One plain process, the reference for every strategy."""
