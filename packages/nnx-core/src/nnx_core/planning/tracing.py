"""Trace one training step of a model on fake tensors: no weight is allocated."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core._torch_compat import FakeTensorMode, tree_leaves
from nnx_core.planning.fakes import unpacked_sequences
from nnx_core.planning.record import Recorder, nbytes_of
from nnx_core.planning.trace import Event, Kind, OptimizerCost, Parameter, Trace

__all__ = ["Step", "fake_mode", "formula_trace", "reason_of", "trace_step"]


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step to trace. All tensors are fake.

    Attributes:
        module: The model.
        loss: Returns the loss of a batch.
        optimizers: Makes the optimizers of the model as it is.
        batch: The batch.
        batch_size: The number of its samples.
        precision: Lightning's precision string.
    """

    module: nn.Module
    loss: Callable[[Any], Tensor]
    optimizers: Callable[[], Sequence[Optimizer]]
    batch: Any
    batch_size: int = 1
    precision: str = "32-true"


def trace_step(step: Step, like: Trace | None = None) -> Trace:
    """Trace a step within `fake_mode`.

    Args:
        step: The step.
        like: A trace of the same model and optimizers, with another batch or another forward.
    """
    module = step.module
    for parameter in module.parameters():
        parameter.grad = None
    recorder = Recorder(module)
    recorder.ignore(step.batch)
    module.train()
    with warnings.catch_warnings(), unpacked_sequences():
        warnings.simplefilter("ignore")
        with recorder.step():
            recorder.phase("forward")
            with _autocast(step.precision):
                loss = step.loss(step.batch)
            recorder.phase("backward")
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        events = tuple(recorder.events)
        if like is None:
            return _described(step, events)
        batch = nbytes_of(step.batch)
        return replace(like, events=events, module=module, batch=batch, batch_size=step.batch_size)


def formula_trace(step: Step, reason: str) -> Trace:
    """Return a trace of a model that cannot be traced: weights, gradients and state, no activations."""
    module = step.module
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    described = _described(step, (Event(Kind.PHASE, "backward"),))
    note = f"the step could not be traced: {reason.removesuffix('.')}. Activations are not counted."
    return replace(described, source="formula", notes=(note,))


def _described(step: Step, events: tuple[Event, ...]) -> Trace:
    """Return the trace of a step; a parameter is trained if it has a gradient now."""
    module, optimizers = step.module, step.optimizers()
    trained = {name for name, p in module.named_parameters() if p.grad is not None}
    cost, state = _optimizer(module, optimizers)
    return Trace(
        events=events,
        parameters={
            name: Parameter(name, tuple(p.shape), p.element_size(), name in trained, *state.get(p, (0, 0)))
            for name, p in module.named_parameters()
        },
        module=module,
        buffers=nbytes_of(list(module.buffers())),
        batch=nbytes_of(step.batch),
        batch_size=step.batch_size,
        optimizer=cost,
        optimizer_name=", ".join(type(optimizer).__name__ for optimizer in optimizers),
        precision=step.precision,
    )


def reason_of(error: Exception) -> str:
    """Return an error with the line of the user's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    place = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}{place}: {first}"


def _optimizer(
    module: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[OptimizerCost, dict[Tensor, tuple[int, int]]]:
    """Return the temporary bytes of a step, and the bytes of each parameter's state."""
    stepped = [
        p for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None
    ]
    if not stepped:
        return OptimizerCost(), {}
    for optimizer in optimizers:
        optimizer.step()  # makes the state
    state: dict[Tensor, tuple[int, int]] = {}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
            like = sum(nbytes_of(t) for t in tensors if t.numel() == parameter.numel() and t.dim())
            state[parameter] = like, nbytes_of(tensors) - like
    everything = _temporary(module, optimizers)
    largest = max(stepped, key=lambda p: p.numel() * p.element_size())
    gradients = {p: p.grad for p in stepped}
    for parameter in stepped:
        parameter.grad = gradients[parameter] if parameter is largest else None
    alone = _temporary(module, optimizers)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    total = sum(p.numel() * p.element_size() for p in stepped)
    most = largest.numel() * largest.element_size()
    # everything = a * total + b * most, alone = (a + b) * most
    if total == most or everything < 1.25 * alone:  # it steps one parameter after the other
        return OptimizerCost(0.0, everything / most), state
    of_sum = max(everything - alone, 0) / (total - most)
    return OptimizerCost(of_sum, alone / most - of_sum), state


def _temporary(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Return the most temporary bytes of a step of any of the optimizers."""
    recorder = Recorder(module)
    recorder.ignore([p.grad for p in module.parameters()])
    recorder.ignore([list(optimizer.state.values()) for optimizer in optimizers])
    most = 0
    with recorder:
        for optimizer in optimizers:
            recorder.peak = recorder.current
            before = recorder.current
            optimizer.step()
            most = max(most, recorder.peak - before)
    return most


def _autocast(precision: str) -> AbstractContextManager[Any]:
    if not precision.endswith("-mixed"):
        return nullcontext()
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    return torch.autocast("cpu", dtype=dtype)
