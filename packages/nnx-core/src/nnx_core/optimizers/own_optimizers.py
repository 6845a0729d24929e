"""Optimizers that user code makes and steps by itself, where an engine reduces gradients for its own ones.

An engine that reduces gradients to the optimizers that it was given leaves all others with the gradients of
each rank's own samples. `OwnOptimizers` sees every step in the process and refuses those. It never touches
gradients.
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
    """Refuse optimizers none of which holds a parameter of the module, such as Lightning's stand-in for None.

    Args:
        module: The module to train.
        optimizers: Those that were configured; without any there is nothing to refuse.
        engine: Names the engine in the message.

    Raises:
        UnsupportedError: There are some, and none holds a parameter of the module that is trained.
    """
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if optimizers and not any(parameter in trained for parameter in _parameters(optimizers)):
        raise no_optimizer(engine)


def no_optimizer(engine: str) -> UnsupportedError:
    """The error for a training without an optimizer."""
    return UnsupportedError(
        f"`configure_optimizers` returns no optimizer over parameters that train, and {engine} shards "
        "gradients for those that it gets; one of a hook would step with each rank's own gradients.",
        remedy=_REMEDY,
    )


_watching: WeakSet[OwnOptimizers] = WeakSet()
"""Those that look at steps in this process; one whose engine is freed is in it no more."""


def refuse_unreduced_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step, before it, that an `OwnOptimizers` of this process refuses; it looks at no values.

    It stays with torch when its engines are gone, as Fabric ends no run, and does nothing then.

    Args:
        optimizer: The optimizer that is to step.

    Raises:
        UnsupportedError: It steps parameters whose gradients no engine has reduced.
    """
    for own in list(_watching):
        own.before_step(optimizer)


@cache
def _hook_into_torch() -> RemovableHandle:
    """Let torch call `refuse_unreduced_step` before every step, from the first call in this process on."""
    return register_optimizer_step_pre_hook(refuse_unreduced_step)


class OwnOptimizers:
    """Refuses steps that would use gradients which the engine has not reduced, until it is freed.

    Args:
        module: The module whose parameters are watched.
        known: Lists the optimizers for which the engine reduces gradients.
        engine: Names the engine in messages.
        only_in_backward: Refuse only steps inside backward, as gradients are reduced to every rank after it.
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
        """Around a backward: until it is over gradients are those of this rank."""
        self._runs_backward = True
        try:
            yield
        finally:
            self._runs_backward = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of another optimizer than the engine's over parameters that it watches."""
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
        """Look no more."""
        _watching.discard(self)


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
