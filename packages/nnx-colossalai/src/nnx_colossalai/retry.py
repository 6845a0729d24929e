"""Repeat a step that ran out of device memory, with a plan that needs less.

This module repeats a step only where the result stays bitwise the same, and otherwise raises the reason. The
plan chooses the new tiers, and `model` moves the chunks.
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
"""Seconds to wait until the other ranks run out of memory too: all ranks lower the plan, or none."""


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(slots=True, eq=False)
class _Forward:
    """The last forward, kept for a retry of its backward.

    Attributes:
        run: The function that ran it.
        random_state: The random state before it.
        outputs: The returned tensors that need gradients.
        gradients: The gradients of these outputs by index, once backward has computed them.
    """

    run: Callable[[], Any]
    random_state: Any
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def watch(self, result: Any) -> None:
        """Record the gradients of the tensors that the forward returned."""
        self.outputs = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.gradients = {}
        for index, output in enumerate(self.outputs):
            output.register_hook(lambda gradient, at=index: self.gradients.__setitem__(at, gradient))  # type: ignore[no-untyped-call]

    def lacks_gradients(self, loss: Tensor) -> bool:
        """Return True if backward ended before it reached an output that the loss was computed from."""
        of_outputs = {output.grad_fn: index for index, output in enumerate(self.outputs)}
        left, seen = [loss.grad_fn], set[Any]()
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            index = of_outputs.get(node)
            if index is None:
                left += [following for following, _ in node.next_functions]
            elif index not in self.gradients:
                return True
        return False

    def free(self, loss: Tensor) -> None:
        """Free the graph from the outputs to the loss; the values stay.

        Tensors that others hold keep their graph: Lightning's frames hold the loss before it is scaled.
        """
        for tensor in (loss, *self.outputs):
            if tensor.grad_fn is not None:
                # A view cannot be detached in place.
                with suppress(RuntimeError):
                    tensor.detach_()
        self.outputs = []


class Retrying:
    """Repeats forwards and backwards that ran out of device memory.

    Args:
        device: The device that runs out of memory.
        world_size: The number of ranks, which lower the plan together.
    """

    def __init__(self, device: Device[Any], world_size: int) -> None:
        self._device, self._world_size = device, world_size
        self._last: dict[ChunkedModel, _Forward] = {}

    def forward(self, model: ChunkedModel, run: Callable[[], T]) -> T:
        """Run the forward of a step, or the complete step if it calls backward itself."""
        forward, freed = _Forward(run, random_state.capture()), 0
        while True:
            try:
                result = run()
                break
            except OUT_OF_MEMORY as error:
                failure = self._as_ours(error)
            # Outside of the handler: the error's frames are freed, with the tensors that they hold.
            freed = self._lower(model, failure, after=freed, why_not=self._why_no_forward_retry(model))
            # The retry draws the same dropout masks.
            random_state.restore(forward.random_state)
        if torch.is_grad_enabled():
            forward.watch(result)
            self._last[model] = forward
        return result

    def backward(self, models: Sequence[ChunkedModel], loss: Tensor, run: Callable[[], None]) -> None:
        """Run a backward; if it runs out of memory, repeat the forward and the backward.

        Args:
            models: The models whose gradients it computes.
            loss: The tensor that backward begins at.
            run: The function that runs the backward.
        """
        # Checked before the backward, which mixes its gradients with earlier ones.
        accumulated = any(_has_gradients(model) for model in models)
        last = self._last.pop(models[0], None) if len(models) == 1 else None
        gradients: dict[int, Tensor] = {}
        lacks_gradients, freed = False, 0
        while True:
            try:
                run()
                return
            except OUT_OF_MEMORY as error:
                failure = self._as_ours(error)
            if last is not None:
                # `watch` clears them in each retry, so those of the first failure are kept.
                if not gradients:
                    gradients, lacks_gradients = last.gradients, last.lacks_gradients(loss)
                # Without this, the retry's forward would build a second graph beside the first.
                last.free(loss)
            why_not = self._why_no_backward_retry(
                gradients, lacks_gradients=lacks_gradients, accumulated=accumulated
            )
            freed = self._lower(models[0], failure, after=freed, why_not=why_not)
            assert last is not None
            run = partial(self._repeat, models[0], last, gradients)

    def _repeat(self, model: ChunkedModel, last: _Forward, gradients: dict[int, Tensor]) -> None:
        _clear_gradients(model)
        random_state.restore(last.random_state)
        last.watch(last.run())
        # The loss is not computed again: the outputs are the same, and their gradients are known.
        outputs = {last.outputs[index]: gradient for index, gradient in sorted(gradients.items())}
        for output, gradient in outputs.items():
            # An output may be computed from another one, whose known gradient counts that path already.
            output.register_hook(lambda _, known=gradient: known)  # type: ignore[no-untyped-call]
        torch.autograd.backward(list(outputs), list(outputs.values()))

    def _lower(self, model: ChunkedModel, failure: DeviceMemoryError, *, after: int, why_not: str) -> int:
        """Lower the plan's device memory on all ranks together, or raise.

        Args:
            model: The model of the plan.
            failure: The out-of-memory error.
            after: The bytes that the last lowering freed, which was too little.
            why_not: The reason why this rank cannot repeat the step; empty if it can.

        Returns:
            The bytes freed.
        """
        # A collective that only some ranks have begun would be matched with a different one of the retry.
        if self._world_size > 1 and not all_arrive(
            f"out of device memory after {collectives_issued()} collectives", timeout=_TIME_FOR_ALL
        ):
            why_not = "the other ranks had room, or ran out of memory elsewhere in the step"
        if why_not:
            raise _with(failure, f"The plan cannot use lower tiers now: {why_not}.") from failure
        try:
            freed = model.lower_tiers(failure, rather=2 * after)
        except PlanError as error:
            raise _with(failure, error.message, error.remedy) from failure
        table = model.placing.table()
        log.warning("Out of memory: %s Moved chunks to lower tiers:\n%s", failure.message, table)
        return freed

    def _as_ours(self, error: BaseException) -> DeviceMemoryError:
        """Return the error as a `DeviceMemoryError` without a traceback."""
        # The frames of the traceback hold the tensors that filled the device.
        if isinstance(error, DeviceMemoryError):
            return error.with_traceback(None)
        message = str(error).rstrip() or "The device is out of memory."
        found = _ASKED.search(message)
        asked = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        return DeviceMemoryError(message, asked=asked, used=self._device.used, allowed=self._device.capacity)

    def _why_no_forward_retry(self, model: ChunkedModel) -> str:
        if torch.is_grad_enabled() and not getattr(model.module, "automatic_optimization", True):
            return "a step of manual optimization may have changed weights already"
        return ""

    def _why_no_backward_retry(
        self, gradients: dict[int, Tensor], *, lacks_gradients: bool, accumulated: bool
    ) -> str:
        if self._world_size > 1:
            return "gradients of the backward that failed are partly reduced over the ranks"
        if not gradients:
            return "the forward before it is not known"
        if lacks_gradients:
            return "the backward failed before the gradients of all outputs were known"
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
