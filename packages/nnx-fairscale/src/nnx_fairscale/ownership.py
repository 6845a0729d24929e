"""Who owns which parameter: fairscale's OSS around an optimizer that stays the user's.

OSS shares whole parameters out over the ranks, lays those of one owner out in one buffer, and broadcasts
that after each step. It also keeps an optimizer of its own for what a rank owns. Here the user's optimizer
is that one: it holds every parameter, and steps with the gradients of the owned ones, so only they get state,
and schedulers, hooks and callbacks see what they know. Private names of OSS are used here and in `sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from fairscale.optim import OSS
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from nnx.errors import UnsupportedError

__all__ = ["Ownership"]

T = TypeVar("T")


class Ownership:
    """The owners of one optimizer's parameters.

    Args:
        optimizer: The user's; its parameters become views on their owners' buffers.
        rank: This rank.
        broadcast_fp16: Send updated parameters in float16.

    Raises:
        UnsupportedError: The optimizer needs all parameters in one place.
    """

    def __init__(self, optimizer: Optimizer, *, rank: int, broadcast_fp16: bool = False) -> None:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "LBFGS computes with all parameters at once, so they cannot have different owners.",
                remedy="Use another optimizer, or strategy 'ddp'.",
            )
        self.optimizer = optimizer
        self._rank = rank
        self._broadcast_fp16 = broadcast_fp16
        self.parts: list[Any] = []
        self._share_out()

    def _share_out(self) -> None:
        self._parameters = _parameters(self.optimizer)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.numel():
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [self._make_part(same) for same in by_dtype.values()]
        self._owners = {p: rank for part in self.parts for p, rank in part._param_to_rank.items()}
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _make_part(self, parameters: list[nn.Parameter]) -> Any:
        """Fairscale's buffers hold one dtype, so each dtype has an OSS."""
        return OSS(
            [{"params": [parameter]} for parameter in parameters],
            optim=lambda groups, **_: self.optimizer,
            broadcast_fp16=self._broadcast_fp16,
        )

    def refresh(self) -> None:
        """Take notice of parameters that were added, frozen or unfrozen. New ones come with new `parts`."""
        if len(_parameters(self.optimizer)) != len(self._parameters):
            self._share_out()
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            for part in self.parts:
                part.refresh_trainable()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates the parameter; of one without elements every rank does."""
        return bool(self._owners.get(parameter, self._rank) == self._rank)

    def owner(self, parameter: nn.Parameter) -> int:
        """The rank that updates the parameter."""
        return int(self._owners.get(parameter, 0))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of the optimizer, in the order of its groups."""
        return self._parameters

    def step(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Update what this rank owns, then give every rank all of it."""
        self.refresh()
        hidden: dict[nn.Parameter, Tensor] = {}

        def hide() -> None:
            for parameter in self._parameters:
                if parameter.grad is not None and not self.owns(parameter):
                    hidden[parameter] = parameter.grad
                    parameter.grad = None

        args, kwargs = _after_closure(hide, args, kwargs)
        try:
            result = step(*args, **kwargs)
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        for part in self.parts:
            part._broadcast_params()
        return result

    def remove(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()


def _after_closure(
    then: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an optimizer's step that do something after the closure, or at once without one."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        then()
        return args, kwargs

    def closure_and_then() -> Any:
        loss = closure()
        then()
        return loss

    return ((closure_and_then, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": closure_and_then})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]
