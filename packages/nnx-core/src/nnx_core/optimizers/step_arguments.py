"""The arguments of an optimizer's step: the closure, and the form in which a step takes it."""

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
        closure: The closure, which comes first or by its name; None without one.
        is_named: True if it came by its name.
        args: The other positional arguments.
        kwargs: The other keyword arguments.
    """

    closure: Callable[[], Any] | None
    is_named: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def calling(self, closure: Callable[[], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another closure, in the form that the step was called with."""
        if closure is None:
            return self.args, self.kwargs
        if self.is_named:
            return self.args, {**self.kwargs, "closure": closure}
        return (closure, *self.args), self.kwargs


def take_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Split the closure, the first argument of every step, from the rest."""
    if args:
        return StepArguments(args[0], False, args[1:], kwargs)
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return StepArguments(kwargs.get("closure"), "closure" in kwargs, (), rest)


def with_closure(
    step: Callable[..., Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that give a step its closure: by its name, as Trainer does, where it has that."""
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
