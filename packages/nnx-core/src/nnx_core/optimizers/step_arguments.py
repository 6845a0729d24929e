"""The arguments of an optimizer's step: the closure, and the way of passing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["StepArguments", "take_closure", "with_closure"]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """The arguments of an optimizer's step.

    Attributes:
        closure: The closure, the first argument or a keyword argument; None without one.
        is_named: True if it is a keyword argument.
        args: The other positional arguments.
        kwargs: The other keyword arguments.
    """

    closure: Callable[[], Any] | None
    is_named: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def calling(self, closure: Callable[[], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with another closure, passed in the same way."""
        if closure is None:
            return self.args, self.kwargs
        if self.is_named:
            return self.args, {**self.kwargs, "closure": closure}
        return (closure, *self.args), self.kwargs


def take_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Split the closure from the other arguments of a step."""
    if args:
        return StepArguments(args[0], False, args[1:], kwargs)
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return StepArguments(kwargs.get("closure"), "closure" in kwargs, (), rest)


def with_closure(
    step: Callable[..., Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that pass a closure to a step, by keyword if possible, as Trainer does."""
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return (closure,), {}
    kinds = [parameter.kind for parameter in parameters.values()][1:]  # the first is the optimizer
    if "closure" in parameters and parameters["closure"].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return (), {"closure": closure}
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if any(kind not in named for kind in kinds):
        return (closure,), {}
    return (), {"closure": closure} if inspect.Parameter.VAR_KEYWORD in kinds else {}
