"""Private names of torch's autograd that this package uses. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

__all__ = [
    "NO_BACKWARD",
    "Silenced",
    "accumulator_of",
    "call_at_end",
    "current_backward",
    "make_last",
    "will_run",
]

NO_BACKWARD = -1
"""What `current_backward` returns outside of any."""


def current_backward() -> int:
    """A number of the backward that this thread is in; one within another has its own."""
    return int(torch._C._current_graph_task_id())


def call_at_end(callback: Callable[[], None]) -> None:
    """Call something when the backward that this thread is in has ended well."""
    Variable._execution_engine.queue_callback(callback)


def accumulator_of(tensor: Tensor) -> Any:
    """The node that a tensor's gradient ends in, or comes from."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def will_run(node: Any) -> bool | None:
    """Whether the backward that this thread is in comes by a node; None: it does not tell.

    It does not for the gradients that ``torch.autograd.grad`` was asked for.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def make_last(handle: RemovableHandle) -> None:
    """Make a hook that sees an accumulated gradient the last of its parameter's."""
    hooks = handle.hooks_dict_ref()
    if hooks and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        # The engine goes by the order of insertion.
        hooks[handle.id] = hooks.pop(handle.id)


class Silenced:
    """Hooks that are not called for a while.

    Args:
        handles: Of the hooks.
    """

    __slots__ = ("_taken",)

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._taken = []
        for handle in handles:
            hooks, number = handle.hooks_dict_ref(), handle.id
            if hooks is not None and number in hooks:
                self._taken.append((hooks, number, hooks.pop(number)))

    def end(self, *, are_first: bool = False) -> None:
        """Let them be called again, after all others or, with `are_first`, before them."""
        for hooks, number, hook in self._taken:
            hooks[number] = hook
            if are_first and len(hooks) > 1:
                hooks.move_to_end(number, last=False)
        self._taken.clear()
