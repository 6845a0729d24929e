"""The module that Fabric calls in place of the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

from nnx.backend import Backend

__all__ = ["EngineModule", "unwrap_engine"]


class EngineModule(nn.Module):
    """Runs the user's module through the engine.

    Args:
        module: The user's module, laid out in place.
        backend: The engine.
    """

    def __init__(self, module: nn.Module, backend: Backend[Any]) -> None:
        super().__init__()
        self.module = module
        self.backend = backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, through `Backend.run_step`."""
        return self.backend.run_step(self.module, self.module, *args, **kwargs)


def unwrap_engine(module: nn.Module) -> nn.Module:
    """The user's module."""
    return module.module if isinstance(module, EngineModule) else module
