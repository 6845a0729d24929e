"""One run of `torch.export` over a module's forward, with everything around it that makes the result right.

Owns the call into torch's exporter; hands on its graph, the structure of the outputs and the calls of
submodules that stay whole. Never raises past what happened in the user's code.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nnx.random_state import forked
from nnx_nnscaler.trace.guard import (
    attributes_restored,
    collectives_refused,
    hooks_removed,
    noticing,
)
from nnx_nnscaler.trace.inputs import Inputs
from nnx_nnscaler.trace.structure import take_apart
from nnx_nnscaler.trace.whole import Call, Recorded, calls_replaced, stand_in

__all__ = ["PREFIX", "Exported", "SideEffectError", "export_forward"]

PREFIX = "m"
"""Where the user's root is within the module that is exported."""


class SideEffectError(Exception):
    """The forward changed attributes of modules, which a graph would not do.

    Attributes:
        changed: Fully qualified name of each module to one attribute.
    """

    def __init__(self, changed: dict[str, str]) -> None:
        super().__init__(changed)
        self.changed = changed


@dataclass
class Exported:
    """What came out of an export.

    Attributes:
        program: torch's own result.
        inputs: What went in.
        structure: The forward's result with Slots for the first tensors among the program's outputs.
        calls: Calls of submodules that stay whole, by the key that the operator carries.
        dropped: Classes of caches that were left out of the outputs.
        gradients: Whether gradients are recorded.
    """

    program: ExportedProgram
    inputs: Inputs
    structure: Any = None
    calls: dict[str, Call] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    gradients: bool = True


class _Root(nn.Module):
    """The user's root with tensors only as inputs and outputs."""

    def __init__(self, module: nn.Module, run: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.m = module
        self.run = run

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self.run(*leaves)


def export_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    inputs: Inputs,
    recorded: dict[str, list[Recorded]],
) -> Exported:
    """Trace a forward for a sample.

    Args:
        module: The root.
        forward: Its forward.
        inputs: The sample; its batched leaves get a symbolic dim 0.
        recorded: For every submodule that is to stay whole, what it returns, call by call.

    Raises:
        SideEffectError: The forward changed attributes of modules.
        Exception: Whatever torch or the user's code raised.
    """
    gradients = torch.is_grad_enabled()
    exported = Exported(None, inputs, gradients=gradients)  # type: ignore[arg-type] # filled below
    modules = {name: found for name, found in module.named_modules() if name in recorded}
    changed: dict[str, str] = {}
    batch: list[Any] = [0]
    tokens: list[Tensor] = []

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        if inputs.batched:
            batch[0] = leaves[inputs.tensors.index(inputs.batched[0])].shape[0]
        tokens.clear()
        args, kwargs = inputs.rebuild(leaves)
        stand = stand_in(recorded, exported.calls, tokens, lambda: batch[0])
        # Within the trace: torch puts attributes back itself, with no more than a warning.
        with attributes_restored(module) as found, calls_replaced(modules, stand):
            result = forward(*args, **kwargs)
        changed.update({name: what for name, what in found.items() if not _within(name, recorded)})
        tensors: list[Tensor] = []
        exported.dropped.clear()
        exported.structure = take_apart(
            result, tensors, dropped=exported.dropped if module.training else None
        )
        return (*tensors, *tokens)

    leaves = tuple(inputs.leaves[index] for index in inputs.tensors)
    dims = tuple({0: Dim.AUTO} if index in inputs.batched else None for index in inputs.tensors)
    root = _Root(module, run)
    root.training = module.training
    with ExitStack() as stack:
        _enter_guards(stack, module)
        exported.program = torch.export.export(root, leaves, strict=False, dynamic_shapes=(dims,))
    if changed:
        raise SideEffectError(changed)
    return exported


def _enter_guards(stack: ExitStack, module: nn.Module) -> None:
    """What keeps a trace from leaving marks on the module and the process, and from hiding what it loses."""
    for context in (
        attributes_restored(module),
        forked(),
        _quiet(),
        noticing(module),
        hooks_removed(module),
        collectives_refused(),
        _autocast_hidden(),
    ):
        stack.enter_context(context)


def _within(name: str, kept: dict[str, list[Recorded]]) -> bool:
    return any(name == fqn or name.startswith(f"{fqn}.") for fqn in kept)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own warnings: what matters of them is raised as an error."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export", "torch.fx.experimental")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _autocast_hidden() -> Iterator[None]:
    """Trace outside autocast, but let code that asks be told of it.

    Operators of a program run under the autocast of the call, so a trace must not have its casts in it. Some
    code, such as rotary embeddings, switches autocast off where it is on, and has to be seen doing so.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        yield
        return
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    real = torch.is_autocast_enabled

    def is_autocast_enabled(kind: str | None = None) -> bool:
        return (kind or kinds[0]) in dtypes

    torch.is_autocast_enabled = is_autocast_enabled  # type: ignore[assignment]
    try:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.is_autocast_enabled = real
