"""The module that Fabric calls in place of the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

from nnx_core.backend import Backend
from nnx_core.shares import SharedBatches


class EngineModule(nn.Module):
    """Runs the user's module through the engine.

    Args:
        module: The user's module, laid out in place.
        backend: The engine.
        batches: Compares what ranks that compute one batch together are called with.
    """

    def __init__(
        self, module: nn.Module, backend: Backend[Any], batches: SharedBatches | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.backend = backend
        self._batches = batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, through `Backend.run_step`."""
        if self._batches is not None:
            self._batches.compare((args, kwargs), where=f"the forward of {type(self.module).__name__}")
        return self.backend.run_step(self.module, self.module, *args, **kwargs)


def unwrap_engine(module: nn.Module) -> nn.Module:
    """The user's module."""
    return module.module if isinstance(module, EngineModule) else module
