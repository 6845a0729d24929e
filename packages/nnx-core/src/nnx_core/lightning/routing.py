"""Route Lightning's clipping, loss scaling, backward and steps through the backend.

Lightning's precision plugins clip and scale ``param.grad`` of plain parameters, which is wrong for sharded
ones. The plugin object stays the user's; some of its methods are replaced on the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx_core.agree.data_sharding import SharedBatches
from nnx_core.backend import Backend
from nnx_core.errors import UnsupportedError

_OF_PLUGINS = ("backward", "clip_grad_by_norm", "clip_grad_by_value")
"""The methods of a precision plugin that are replaced on the instance."""


def publishes_gradients(backend: Backend[Any]) -> bool:
    """Return True if gradients are outside of ``p.grad`` until the engine publishes them."""
    return type(backend).publish_gradients is not Backend.publish_gradients


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's own optimizer from ``LightningOptimizer`` or Fabric's wrapper."""
    for attribute in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer):
            return inner
    return optimizer


def route_precision(plugin: Any, backend: Backend[Any], *, then: Callable[[], None] = lambda: None) -> None:
    """Replace the plugin's loss scaler, and its backward if the engine has its own.

    Args:
        plugin: The precision plugin.
        backend: The engine.
        then: Called after a backward of the engine, before hooks that read gradients.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        plugin.scaler = backend.grad_scaler(scaler)
    if has_own_backward(backend) or publishes_gradients(backend):

        def backward(
            loss: Tensor, model: nn.Module, optimizer: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            with _going_backward(backend):
                backend.backward(model, loss, *args, **kwargs)
            then()

        plugin.backward = backward


_backward: set[int] = set()
"""The ids of the backends whose backward is running."""


@contextmanager
def _going_backward(backend: Backend[Any]) -> Iterator[None]:
    _backward.add(id(backend))
    try:
        yield
    finally:
        _backward.discard(id(backend))


def refuse_plain_backward(backend: Backend[Any], module: Any) -> list[RemovableHandle]:
    """Refuse ``loss.backward()`` in manual optimization, for engines that reduce only in their own backward.

    Args:
        backend: The engine.
        module: The laid-out LightningModule.

    Returns:
        Handles that remove the hooks from its parameters.
    """
    if module.automatic_optimization or not backend.reduces_in_backward:
        return []

    def refuse(parameter: Tensor) -> None:
        if id(backend) not in _backward:
            raise UnsupportedError(
                "`loss.backward()` was called in manual optimization, but this strategy reduces gradients "
                "in a backward of its own.",
                remedy="Call `self.manual_backward(loss)`.",
            )

    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [parameter.register_post_accumulate_grad_hook(refuse) for parameter in trained]


def has_own_backward(backend: Backend[Any]) -> bool:
    """Return True if the engine overrides backward."""
    return type(backend).backward is not Backend.backward


def route_clipping(plugin: Any, backend: Backend[Any]) -> None:
    """Make the plugin clip over all ranks' gradients, because Trainer clips through it."""

    def by_norm(optimizer: Any, clip_val: float) -> None:
        backend.clip_grad_norm(unwrap_optimizer(optimizer), float(clip_val))

    def by_value(optimizer: Any, clip_val: float) -> None:
        backend.clip_grad_value(unwrap_optimizer(optimizer), float(clip_val))

    plugin.clip_grad_by_norm = by_norm
    plugin.clip_grad_by_value = by_value


def unroute_precision(plugin: Any) -> None:
    """Restore a precision plugin's own methods; its loss scaler keeps the current scale."""
    for name in _OF_PLUGINS:
        vars(plugin).pop(name, None)


def route_optimizer_steps(optimizers: Iterable[Any], backend: Backend[Any], module: nn.Module) -> None:
    """Make ``optimizer.step`` call `Backend.optimizer_step`, if the engine overrides it.

    Between the closure and the step, the engine takes over published gradients that user code has changed.
    Each ``zero_grad`` is recorded, too.

    Args:
        optimizers: The user's optimizers, and Lightning's wrappers of them; some may be routed already.
        backend: The engine.
        module: The module whose parameters they step.
    """
    has_own_step = type(backend).optimizer_step is not Backend.optimizer_step
    is_routed = has_own_step or publishes_gradients(backend)
    for wrapped in optimizers:
        optimizer = unwrap_optimizer(wrapped)
        backend.failed_backward.watch(optimizer, wrapped)
        if is_routed and getattr(optimizer.step, "nnx_backend", None) is not backend:
            optimizer.step = _routed(optimizer, backend, module)


def _routed(optimizer: Optimizer, backend: Backend[Any], module: nn.Module) -> MethodType:
    """Return a step that calls the engine; a bound method, because schedulers wrap its function."""
    inner = optimizer.step

    @wraps(inner)  # also copies the mark of schedulers on steps that they have wrapped
    def step(owner: Optimizer, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            backend.failed_backward.refuse()
            backend.collect_gradients(module)
            return backend.optimizer_step(owner, inner, *args, **kwargs)

        def closure_and_collect() -> Any:
            loss = closure()
            backend.collect_gradients(module)
            return loss

        if "closure" in kwargs:
            return backend.optimizer_step(owner, inner, *args, **{**kwargs, "closure": closure_and_collect})
        return backend.optimizer_step(owner, inner, closure_and_collect, *args[1:], **kwargs)

    step.nnx_backend = backend  # type: ignore[attr-defined]
    return MethodType(step, optimizer)


class EngineModule(nn.Module):
    """Runs the user's module through the engine.

    Args:
        module: The user's module, laid out in place.
        backend: The engine.
        batches: Compares the inputs of ranks that compute one batch together.
    """

    def __init__(
        self, module: nn.Module, backend: Backend[Any], batches: SharedBatches | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.backend = backend
        self._batches = batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward through `Backend.run_step`."""
        if self._batches is not None:
            self._batches.compare((args, kwargs), where=f"the forward of {type(self.module).__name__}")
        return self.backend.run_step(self.module, self.module, *args, **kwargs)


def unwrap_engine(module: nn.Module) -> nn.Module:
    """Return the user's module."""
    return module.module if isinstance(module, EngineModule) else module
