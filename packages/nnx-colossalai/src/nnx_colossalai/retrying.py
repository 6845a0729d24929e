"""What happens when a step runs out of device memory: the plan moves down, and the step runs again.

It owns the decision whether a step can be repeated so that no number changes, and the words where it cannot.
Where chunks go instead is the plan's; moving them is `chunked`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nnx_checkpoint.collective import all_arrive
from nnx_colossalai.errors import DeviceMemoryError
from nnx_colossalai.model import ChunkedModel
from nnx_core import random_state
from nnx_core.errors import PlanError

__all__ = ["OUT_OF_MEMORY", "Retrying"]

T = TypeVar("T")
log = logging.getLogger("nnx.colossalai")

OUT_OF_MEMORY = (DeviceMemoryError, torch.OutOfMemoryError)
_TIME_FOR_ALL = 5.0
"""Seconds in which the other ranks must have run out of memory as well, to move the plan down together."""


@dataclass(slots=True, eq=False)
class _Forward:
    """The last forward, to be repeated if its backward fails.

    Attributes:
        run: The function that ran.
        random_state: Before it.
        outputs: Tensors that it returned and that need gradients.
        gradients: The gradients of these outputs, by place, once backward has come to them.
    """

    run: Callable[[], Any]
    random_state: Any
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def watch(self, result: Any) -> None:
        """Take notice of the gradients of what the forward returned."""
        self.outputs = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.gradients = {}
        for place, output in enumerate(self.outputs):
            output.register_hook(lambda gradient, at=place: self.gradients.__setitem__(at, gradient))  # type: ignore[no-untyped-call]


class Retrying:
    """Repeats forwards and backwards that the device had no room for.

    Args:
        world_size: Number of ranks, which only move together.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last: dict[ChunkedModel, _Forward] = {}

    def forward(self, model: ChunkedModel, run: Callable[[], T]) -> T:
        """Run a step's forward; or all of it, where the user's step calls backward itself."""
        forward = _Forward(run, random_state.capture())
        while True:
            try:
                result = run()
                break
            except OUT_OF_MEMORY as error:
                failure = _as_ours(error)
            self._lower(model, failure, why_not=self._why_forward_stays(model))
            random_state.restore(forward.random_state)
        if torch.is_grad_enabled():
            forward.watch(result)
            self._last[model] = forward
        return result

    def backward(self, models: Sequence[ChunkedModel], run: Callable[[], None]) -> None:
        """Run a backward; if it fails, the forward and the backward once more."""
        accumulated = any(_has_gradients(model) for model in models)
        last = self._last.pop(models[0], None) if len(models) == 1 else None
        try:
            run()
            return
        except OUT_OF_MEMORY as error:
            failure = _as_ours(error)
        why_not = self._why_backward_stays(last, accumulated=accumulated)
        self._lower(models[0], failure, why_not=why_not)
        assert last is not None
        self._repeat(models[0], last)

    def _repeat(self, model: ChunkedModel, last: _Forward) -> None:
        gradients = dict(last.gradients)
        _clear_gradients(model)
        random_state.restore(last.random_state)
        last.watch(last.run())
        outputs = [last.outputs[place] for place in sorted(gradients)]
        torch.autograd.backward(outputs, [gradients[place] for place in sorted(gradients)])

    def _lower(self, model: ChunkedModel, failure: DeviceMemoryError, *, why_not: str) -> None:
        """Move the plan down, all ranks together, or raise."""
        if self._world_size > 1 and not all_arrive("out of device memory", timeout=_TIME_FOR_ALL):
            why_not = "the other ranks had room, so they are in another step by now"
        if why_not:
            raise _with(failure, f"The plan cannot move down now: {why_not}.") from failure
        try:
            model.move_down(failure)
        except PlanError as error:
            raise _with(failure, error.message, error.remedy) from failure
        log.warning("Out of memory: %s The plan moved down:\n%s", failure.message, model.placing.table())

    def _why_forward_stays(self, model: ChunkedModel) -> str:
        if torch.is_grad_enabled() and not getattr(model.module, "automatic_optimization", True):
            return "a step of manual optimization may have changed weights already"
        return ""

    def _why_backward_stays(self, last: _Forward | None, *, accumulated: bool) -> str:
        if self._world_size > 1:
            return "gradients of the backward that failed are partly reduced over the ranks"
        if last is None or not last.gradients:
            return "the forward before it is not known"
        if accumulated:
            return "gradients of the backward that failed are mixed with those accumulated before"
        return ""


def _as_ours(error: BaseException) -> DeviceMemoryError:
    """The error in our terms; without its frames, which hold on to what filled the device."""
    if isinstance(error, DeviceMemoryError):
        return error.with_traceback(None)
    return DeviceMemoryError(str(error).rstrip() or "The device is out of memory.")


def _with(failure: DeviceMemoryError, reason: str, remedy: str = "") -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{failure.message} {reason[:1].upper()}{reason[1:]}",
        remedy=f"{failure.remedy} {remedy}".strip(),
        asked=failure.asked,
        used=failure.used,
        allowed=failure.allowed,
    )


def _masters(model: ChunkedModel) -> list[nn.Parameter]:
    return [master for chunk in model.engine.chunks for master in chunk.masters.values()]


def _has_gradients(model: ChunkedModel) -> bool:
    return any(master.grad is not None for master in _masters(model))


def _clear_gradients(model: ChunkedModel) -> None:
    for master in _masters(model):
        master.grad = None
