"""Repeat a step that ran out of device memory, after the plan has moved down.

This module decides whether a step can be repeated so that no number changes, and says where it cannot. The
plan decides where chunks go instead, and `model` moves them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nnx_base.ranks import all_arrive
from nnx_colossalai._torch_compat import collectives_issued
from nnx_colossalai.device import Device
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.model import ChunkedModel
from nnx_core import random_state
from nnx_core._torch_compat import tree_leaves
from nnx_core.errors import PlanError

T = TypeVar("T")
log = logging.getLogger("nnx.colossalai")

OUT_OF_MEMORY = (DeviceMemoryError, torch.OutOfMemoryError)


_TIME_FOR_ALL = 5.0
"""Seconds in which the other ranks must have run out of memory as well, to move the plan down together."""


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


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

    def free(self, loss: Tensor) -> None:
        """Free the graph from the outputs to the loss; the values stay.

        What somebody else still holds of it stays too: Lightning's frames hold the loss before it is scaled.
        """
        for tensor in (loss, *self.outputs):
            if tensor.grad_fn is not None:
                with suppress(RuntimeError):  # of a view, which cannot be detached in place
                    tensor.detach_()
        self.outputs = []


class Retrying:
    """Repeats forwards and backwards that the device had no room for.

    Args:
        device: The device that runs out of memory.
        world_size: Number of ranks, which only move together.
    """

    def __init__(self, device: Device[Any], world_size: int) -> None:
        self._device, self._world_size = device, world_size
        self._last: dict[ChunkedModel, _Forward] = {}

    def forward(self, model: ChunkedModel, run: Callable[[], T]) -> T:
        """Run a step's forward; or all of it, where the user's step calls backward itself."""
        forward, freed = _Forward(run, random_state.capture()), 0
        while True:
            try:
                result = run()
                break
            except OUT_OF_MEMORY as error:
                failure = self._as_ours(error)
            freed = self._lower(model, failure, after=freed, why_not=self._why_forward_stays(model))
            random_state.restore(forward.random_state)
        if torch.is_grad_enabled():
            forward.watch(result)
            self._last[model] = forward
        return result

    def backward(self, models: Sequence[ChunkedModel], loss: Tensor, run: Callable[[], None]) -> None:
        """Run a backward; where it fails, the forward and the backward again.

        Args:
            models: Whose gradients it computes.
            loss: The tensor that backward begins at.
            run: The backward.
        """
        accumulated = any(_has_gradients(model) for model in models)
        last = self._last.pop(models[0], None) if len(models) == 1 else None
        gradients: dict[int, Tensor] = {}
        freed = 0
        while True:
            try:
                run()
                return
            except OUT_OF_MEMORY as error:
                failure = self._as_ours(error)
            if last is not None:
                gradients = gradients or last.gradients
                last.free(loss)  # or there would be two graphs
            why_not = self._why_backward_stays(gradients, accumulated=accumulated)
            freed = self._lower(models[0], failure, after=freed, why_not=why_not)
            assert last is not None
            run = partial(self._repeat, models[0], last, gradients)

    def _repeat(self, model: ChunkedModel, last: _Forward, gradients: dict[int, Tensor]) -> None:
        _clear_gradients(model)
        random_state.restore(last.random_state)
        last.watch(last.run())
        outputs = [last.outputs[place] for place in sorted(gradients)]
        torch.autograd.backward(outputs, [gradients[place] for place in sorted(gradients)])

    def _lower(self, model: ChunkedModel, failure: DeviceMemoryError, *, after: int, why_not: str) -> int:
        """Move the plan down, all ranks together, or raise.

        Args:
            model: Whose plan.
            failure: The error that it failed with.
            after: Bytes that moving down has freed a moment ago, which was too little.
            why_not: Why this rank cannot repeat the step; empty if it can.

        Returns:
            Bytes that moving down has freed.
        """
        # A collective that some ranks have begun and others not would be paired with one of the next try.
        if self._world_size > 1 and not all_arrive(
            f"out of device memory after {collectives_issued()} collectives", timeout=_TIME_FOR_ALL
        ):
            why_not = "the other ranks had room, or ran out of memory elsewhere in the step"
        if why_not:
            raise _with(failure, f"The plan cannot move down now: {why_not}.") from failure
        try:
            freed = model.move_down(failure, rather=2 * after)
        except PlanError as error:
            raise _with(failure, error.message, error.remedy) from failure
        log.warning("Out of memory: %s The plan moved down:\n%s", failure.message, model.placing.table())
        return freed

    def _as_ours(self, error: BaseException) -> DeviceMemoryError:
        """The error in our terms; without its frames, which hold on to what filled the device."""
        if isinstance(error, DeviceMemoryError):
            return error.with_traceback(None)
        message = str(error).rstrip() or "The device is out of memory."
        found = _ASKED.search(message)
        asked = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        return DeviceMemoryError(message, asked=asked, used=self._device.used, allowed=self._device.capacity)

    def _why_forward_stays(self, model: ChunkedModel) -> str:
        if torch.is_grad_enabled() and not getattr(model.module, "automatic_optimization", True):
            return "a step of manual optimization may have changed weights already"
        return ""

    def _why_backward_stays(self, gradients: dict[int, Tensor], *, accumulated: bool) -> str:
        if self._world_size > 1:
            return "gradients of the backward that failed are partly reduced over the ranks"
        if not gradients:
            return "the forward before it is not known"
        if accumulated:
            return "gradients of the backward that failed are mixed with those accumulated before"
        return ""


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
