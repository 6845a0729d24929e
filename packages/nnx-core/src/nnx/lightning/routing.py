"""Send what Lightning does itself (clipping, loss scaling, backward, stepping) through the backend.

Lightning's precision plugins clip and scale on ``param.grad`` of plain parameters, which is wrong for
sharded ones. The plugin object stays the user's; single methods of it are replaced on the instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.backend import Backend

__all__ = ["route_clipping", "route_optimizer_steps", "route_precision", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The user's own optimizer out of ``LightningOptimizer`` or Fabric's wrapper."""
    for attribute in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer):
            return inner
    return optimizer


def route_precision(plugin: Any, backend: Backend[Any]) -> None:
    """Make loss scaling agree over the ranks and, where the engine has its own, replace backward."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        plugin.scaler = backend.grad_scaler(scaler)
    if type(backend).backward is not Backend.backward:

        def backward(
            loss: Tensor, model: nn.Module, optimizer: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            backend.backward(model, loss, *args, **kwargs)

        plugin.backward = backward


def route_clipping(plugin: Any, backend: Backend[Any]) -> None:
    """Trainer clips through the plugin: make it clip over all ranks' gradients."""

    def by_norm(optimizer: Any, clip_val: float) -> None:
        backend.clip_grad_norm(unwrap_optimizer(optimizer), float(clip_val))

    def by_value(optimizer: Any, clip_val: float) -> None:
        backend.clip_grad_value(unwrap_optimizer(optimizer), float(clip_val))

    plugin.clip_grad_by_norm = by_norm
    plugin.clip_grad_by_value = by_value


def route_optimizer_steps(optimizers: Iterable[Any], backend: Backend[Any]) -> None:
    """Make ``optimizer.step`` call the engine's `Backend.optimizer_step`, where it has its own."""
    if type(backend).optimizer_step is Backend.optimizer_step:
        return
    for wrapped in optimizers:
        optimizer = unwrap_optimizer(wrapped)
        optimizer.step = _routed(optimizer, backend)


def _routed(optimizer: Optimizer, backend: Backend[Any]) -> MethodType:
    """A step that goes through the engine; a bound method, because schedulers wrap its function."""
    inner = optimizer.step

    @wraps(inner)  # with the mark by which a scheduler knows that it wrapped it already
    def step(owner: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return backend.optimizer_step(owner, inner, *args, **kwargs)

    return MethodType(step, optimizer)
