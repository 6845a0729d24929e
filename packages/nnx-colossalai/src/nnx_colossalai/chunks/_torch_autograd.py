"""Private names of torch's autograd that this package uses. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
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


def make_last(handle: RemovableHandle, parameter: nn.Parameter) -> None:
    """Make a hook that sees an accumulated gradient the last of its parameter's."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        # The engine goes by the order of insertion.
        hooks[handle.id] = hooks.pop(handle.id)


class Silenced:
    """A hook that is not called for a while.

    Args:
        handle: Of the hook.
        is_first: Whether it comes before all others then, and not after them.
    """

    __slots__ = ("_hook", "_hooks", "_id", "_is_first")

    def __init__(self, handle: RemovableHandle, *, is_first: bool = False) -> None:
        self._id, self._is_first = handle.id, is_first
        self._hooks = handle.hooks_dict_ref()
        self._hook = self._hooks.pop(self._id, None) if self._hooks is not None else None

    def end(self) -> None:
        """Let it be called again."""
        if self._hooks is None or self._hook is None:
            return
        self._hooks[self._id] = self._hook
        if self._is_first:
            self._hooks.move_to_end(self._id, last=False)
