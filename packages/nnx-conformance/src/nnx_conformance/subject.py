"""The strategy under test, as plain data that travels to the workers, and how they build it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnx_core.names.spec import LIGHTNING_NAMES, Capabilities

Kind = Literal["backend", "strategy", "lightning"]
"""What stands behind a name: an `nnx.Backend`, a plugin's own Lightning strategy, or one of Lightning's."""

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
        options: Keyword arguments for it.
        imports: Modules that every process imports first, such as one that registers the name.
        accelerator: The accelerator that Trainer and Fabric get.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    imports: tuple[str, ...] = ()
    accelerator: str = "cpu"

    @property
    def name(self) -> str:
        """The name under which the registries know it."""
        return _UNREGISTERED if ":" in self.strategy else self.strategy

    @property
    def is_lightning(self) -> bool:
        """True if the name is one of Lightning's own."""
        return self.strategy in LIGHTNING_NAMES

    def prepare(self) -> None:
        """Make the name known in this process."""
        import nnx_core

        for module in self.imports:
            importlib.import_module(module)
        if ":" in self.strategy:
            nnx_core.StrategyRegistry.register(_UNREGISTERED, self.strategy, override=True)

    def flag(self, namespace: str = "lightning.pytorch") -> Any:
        """What to pass as ``strategy=``: the name, or an object where there are options.

        Args:
            namespace: Root of the Lightning tree whose Trainer or Fabric gets it.
        """
        if not self.options:
            return self.name
        import nnx_core

        return nnx_core.strategy(self.name, namespace=namespace, **self.options)

    def identify(self) -> Identity:
        """Look at what stands behind the name. Imports the engine.

        Raises:
            NnxError: The name is not known, or its class cannot be imported.
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
    """What stands behind a name.

    Attributes:
        kind: A `Backend`, a plugin's own Lightning strategy, or one of Lightning's.
        capabilities: The capabilities that it declares.
        owner: The distribution that it comes from.
        target: Its class.
        init_params: The options that the class always gets under this name, unless the subject's say
            otherwise.
    """

    kind: Kind
    capabilities: Capabilities
    owner: str
    target: str
    init_params: Mapping[str, Any] = field(default_factory=dict, hash=False)


REFERENCE = Subject("auto")
"""One plain process: what every strategy must be equal to."""
