"""Refuse optimizers of user code whose gradients the engine does not reduce.

An engine may reduce gradients only for the optimizers of `configure_optimizers`. Any other optimizer would
step with the gradients of each rank's own samples. `OwnOptimizers` checks every step in the process, and
refuses those. It does not change gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nnx_core.errors import UnsupportedError

__all__ = ["OwnOptimizers", "refuse_no_optimizer", "refuse_unreduced_step"]

_REMEDY = (
    "Return it from `configure_optimizers`, and step it after `self.manual_backward(loss)`; or use a "
    "strategy that reduces gradients to every rank, such as 'nnscaler_zero'."
)


def refuse_no_optimizer(module: nn.Module, optimizers: Sequence[Optimizer], *, engine: str) -> None:
    """Refuse optimizers without any parameter of the module, such as Lightning's placeholder for None.

    Args:
        module: The module to train.
        optimizers: The configured optimizers; an empty sequence is allowed.
        engine: The name of the engine, for the message.

    Raises:
        UnsupportedError: None of them holds a trained parameter of the module.
    """
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if optimizers and not any(parameter in trained for parameter in _parameters(optimizers)):
        raise no_optimizer(engine)


def no_optimizer(engine: str) -> UnsupportedError:
    """Return the error for training without an optimizer."""
    return UnsupportedError(
        f"`configure_optimizers` returns no optimizer over parameters that train, and {engine} shards "
        "gradients for those that it gets; an optimizer of a hook would step with each rank's own gradients.",
        remedy=_REMEDY,
    )


_watching: WeakSet[OwnOptimizers] = WeakSet()
"""The active instances of this process; weak, so that freeing an engine removes its instance."""


def refuse_unreduced_step(optimizer: Optimizer, *_: Any) -> None:
    """Check a step with every `OwnOptimizers` of this process, without reading values.

    The hook stays in torch after its engines are freed, because Fabric ends no run, and does nothing then.

    Args:
        optimizer: The optimizer that is about to step.

    Raises:
        UnsupportedError: It steps parameters whose gradients no engine has reduced.
    """
    for own in list(_watching):
        own.before_step(optimizer)


@cache
def _hook_into_torch() -> RemovableHandle:
    """Register `refuse_unreduced_step` with torch for every step, once per process."""
    return register_optimizer_step_pre_hook(refuse_unreduced_step)


class OwnOptimizers:
    """Refuses steps with gradients that the engine has not reduced, until it is freed.

    Args:
        module: The module whose parameters are checked.
        known: Returns the optimizers for which the engine reduces gradients.
        engine: The name of the engine, for messages.
        only_in_backward: Refuse only steps inside backward, for engines that reduce to every rank at its end.
    """

    def __init__(
        self,
        module: nn.Module,
        known: Callable[[], Iterable[Optimizer]],
        *,
        engine: str,
        only_in_backward: bool = False,
    ) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._known, self._engine, self._only_in_backward = known, engine, only_in_backward
        self._runs_backward = False
        _hook_into_torch()
        _watching.add(self)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Mark a backward, in a context: until its end gradients are those of this rank alone."""
        self._runs_backward = True
        try:
            yield
        finally:
            self._runs_backward = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of an unknown optimizer over parameters of the module."""
        known = list(self._known())
        if not self._runs_backward and (self._only_in_backward or any(optimizer is one for one in known)):
            return
        own = [parameter for parameter in _parameters([optimizer]) if parameter in self._names]
        if own and self._runs_backward:
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps {self._names[own[0]]} inside backward, and {self._engine} "
                "reduces gradients when backward ends.",
                remedy=_REMEDY,
            )
        reduced = set(_parameters(known)) if own else set()
        for parameter in own:
            if parameter.grad is not None and parameter not in reduced:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} steps {self._names[parameter]}, which no optimizer of "
                    f"`configure_optimizers` holds, so {self._engine} does not reduce its gradient.",
                    remedy=_REMEDY,
                )

    def remove(self) -> None:
        """Stop checking steps."""
        _watching.discard(self)


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
