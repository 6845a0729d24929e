"""Run `torch.export` once over a module's forward, with the contexts that make the result right.

This module calls torch's exporter. It returns the exported graph, the structure of the outputs, and the calls
of submodules that run in eager mode. Its errors are torch's and the user code's own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nnx_core.random_state import forked
from nnx_nnscaler._torch_compat import free_fake_inputs
from nnx_nnscaler.trace.guard import (
    attributes_restored,
    collectives_refused,
    hooks_removed,
    noticing,
    state_restored,
)
from nnx_nnscaler.trace.structure import Inputs, Refusal, map_slots, put_together, take_apart

__all__ = [
    "Call",
    "Exported",
    "PREFIX",
    "Recorded",
    "Result",
    "SideEffectError",
    "calls_replaced",
    "combine",
    "export_forward",
    "forget_calls",
    "recorder",
    "stand_in",
]


PREFIX = "m"
"""The path of the user's root in the exported module."""


class SideEffectError(Exception):
    """The forward changed attributes of modules, which a graph would not do.

    Attributes:
        changed: One changed attribute by the fully qualified name of each module.
    """

    def __init__(self, changed: dict[str, str]) -> None:
        super().__init__(changed)
        self.changed = changed


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        program: The exported program.
        inputs: The inputs of the export.
        structure: The forward's result with Slots for the first tensors among the program's outputs.
        calls: The calls of submodules in eager mode, by the key that the operator carries.
        dropped: The classes of caches that are omitted from the outputs.
        gradients: True if gradients are recorded.
    """

    program: ExportedProgram
    inputs: Inputs
    structure: Any = None
    calls: dict[str, Call] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    gradients: bool = True


class _Root(nn.Module):
    """The user's root with tensors as its only inputs and outputs."""

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
        recorded: The results of every submodule in eager mode, call by call.

    Raises:
        SideEffectError: The forward changed attributes of modules.
        Exception: Any error of torch or of the user's code.
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
        # Inside the trace, because torch itself restores attributes after it and only warns.
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
    free_fake_inputs(exported.program)
    if changed:
        raise SideEffectError(changed)
    return exported


def _enter_guards(stack: ExitStack, module: nn.Module) -> None:
    """Return the contexts that keep a trace from changing module and process, and report losses."""
    for context in (
        state_restored(module),
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
    """Silence torch's own warnings; errors report the important ones."""
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
    """Trace outside autocast, but report autocast to code that asks.

    A program's operators run under the autocast of the call, so its trace must not contain casts. Some code,
    such as rotary embeddings, switches autocast off if it is on, and the trace must show that.
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


# During a trace, one opaque operator replaces each call of a submodule in eager mode. This section defines
# the operator, its results (metas recorded by a run on the sample), and the replacement of a module's call.
# `Call` keeps the arguments and the result of a call for the graph.


@dataclass(frozen=True)
class Extent:
    """A dim of a result: ``rows`` for each row of the batch, or a fixed number if that is 0."""

    rows: int
    fixed: int

    def at(self, batch: Any) -> Any:
        """Return the size for a batch."""
        return batch * self.rows if self.rows else self.fixed


@dataclass(frozen=True)
class Recorded:
    """The result of one call of a submodule.

    Attributes:
        structure: The result with Slots for tensors.
        shapes: The shape of every tensor.
        dtypes: The dtypes of the tensors.
        devices: The devices of the tensors.
    """

    structure: Any
    shapes: tuple[tuple[Extent, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]


@dataclass(frozen=True)
class Call:
    """One call of a submodule within a trace.

    Attributes:
        fqn: The name of the submodule.
        args: The positional arguments with Slots for tensors.
        kwargs: The keyword arguments with Slots for tensors.
        result: The result of the call.
    """

    fqn: str
    args: Any
    kwargs: Any
    result: Recorded


_calls: dict[str, Call] = {}

Result = tuple[Any, list[tuple[torch.Size, torch.dtype, torch.device]]]
"""The structure of a result, and descriptions of its tensors."""


@torch.library.custom_op("nnx_nnscaler::whole", mutates_args=())
def _whole(tensors: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    """Stand in for a call of a submodule in a trace; its last result keeps the call alive."""
    raise NotImplementedError("nnx_nnscaler::whole stands for a submodule in a trace and cannot be run")


@_whole.register_fake
def _(tensors: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    result = _calls[key].result
    made = [
        torch.empty([extent.at(batch) for extent in shape], dtype=dtype, device=device)
        for shape, dtype, device in zip(result.shapes, result.dtypes, result.devices, strict=True)
    ]
    return [*made, torch.empty(())]


Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def calls_replaced(modules: dict[str, nn.Module], handler: Handler) -> Iterator[None]:
    """Replace calls of modules, hooks included, by `handler(fqn, original, args, kwargs)`."""
    with ExitStack() as stack:
        for fqn, module in modules.items():
            stack.enter_context(_call_replaced(fqn, module, handler))
        yield


@contextmanager
def _call_replaced(fqn: str, module: nn.Module, handler: Handler) -> Iterator[None]:
    cls = type(module)
    inside: list[bool] = []

    def handled(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside:
            return original(module, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            inside.append(True)
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.pop()

        return handler(fqn, run, args, kwargs)

    members = {
        "__call__": lambda _, *args, **kwargs: handled(cls.__call__, args, kwargs),
        "forward": lambda _, *args, **kwargs: handled(cls.forward, args, kwargs),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    try:
        module.__class__ = type(cls.__name__, (cls,), members)
    except TypeError as error:
        raise Refusal(f"calls of {fqn}, a {cls.__name__}, cannot be followed: {error}") from error
    try:
        yield
    finally:
        module.__class__ = cls


def recorder(results: dict[str, list[Result]]) -> Handler:
    """Return a handler that runs the module and records its results, call by call."""

    def handler(fqn: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        tensors: list[Tensor] = []
        structure = take_apart(result, tensors)
        results.setdefault(fqn, []).append((structure, [(t.shape, t.dtype, t.device) for t in tensors]))
        return result

    return handler


def combine(first: list[Result], second: list[Result], batches: tuple[int, int]) -> list[Recorded]:
    """Combine the results of one module for two batch sizes, with sizes that follow the batch.

    Raises:
        Refusal: A size depends on the values of the data.
    """
    if len(first) != len(second):
        raise Refusal("how often it is called depends on the data")
    combined = []
    for (structure, tensors), (other, others) in zip(first, second, strict=True):
        same = structure == other and all(
            len(a) == len(b) and dtype == its
            for (a, dtype, _), (b, its, _) in zip(tensors, others, strict=True)
        )
        if not same:
            raise Refusal("what it returns depends on the data")
        shapes = tuple(
            tuple(_extent(*sizes, batches) for sizes in zip(a[0], b[0], strict=True))
            for a, b in zip(tensors, others, strict=True)
        )
        _, dtypes, devices = zip(*tensors, strict=True) if tensors else ((), (), ())
        combined.append(Recorded(structure, shapes, tuple(dtypes), tuple(devices)))
    return combined


def _extent(first: int, second: int, batches: tuple[int, int]) -> Extent:
    if first == second:
        return Extent(0, first)
    rows = first // batches[0]
    if rows * batches[0] != first or rows * batches[1] != second:
        raise Refusal("the size of its result depends on the data")
    return Extent(rows, 0)


def stand_in(
    recorded: dict[str, list[Recorded]],
    calls: dict[str, Call],
    tokens: list[Tensor],
    batch: Callable[[], Any],
) -> Handler:
    """Return a handler that replaces a call by the opaque operator.

    Args:
        recorded: The results of each module, call by call.
        calls: The dict that gets the calls, by the operator's key.
        tokens: The list that gets one result of every call; the trace returns these to keep the call.
        batch: The size of the batch, symbolic in a trace.
    """
    counts: dict[str, int] = {}

    def handler(fqn: str, _: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = counts.get(fqn, 0)
        counts[fqn] = number + 1
        if number >= len(recorded.get(fqn, ())):
            raise Refusal("how often it is called depends on the data")
        tensors: list[Tensor] = []
        apart = take_apart((list(args), dict(kwargs)), tensors)
        map_slots(apart, lambda part: part, make=_no_objects)
        key = f"{fqn}#{number}"
        result = recorded[fqn][number]
        calls[key] = _calls[key] = Call(fqn, apart[0], apart[1], result)
        *made, token = _whole(tensors, batch(), key)
        tokens.append(token)
        return put_together(result.structure, made)

    return handler


def _no_objects(made: Any) -> Any:
    raise Refusal(f"it is given a {made.type.partition(':')[2]}")


def forget_calls() -> None:
    """Drop the calls of the last trace."""
    _calls.clear()
