"""Restore everything that a trace changes, and refuse code that a graph could not repeat.

This module restores random states, attributes, buffers and hooks after a trace or a run on a sample. It finds
side effects, collectives, `torch.utils.checkpoint` and custom autograd functions: when they run, or by the
names in the code that a forward reaches.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from nnx_core._torch_compat import TorchDispatchMode, versions_kept
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.random_state import forked
from nnx_core.view.side_effects import PythonState, is_users_own
from nnx_nnscaler._torch_compat import checkpoints_replaced, lstm_replaced, saves_inputs_only
from nnx_nnscaler.trace.structure import Refusal

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COLLECTIVES = (
    *("all", "_allgather", "barrier", "broadcast", "gather", "monitored_barrier"),
    *("recv", "reduce", "_reduce_scatter", "scatter", "send"),
)
"""Prefixes of the methods of a process group that communicate; the others read its name, size and so on."""


class CommunicationError(Refusal):
    """The forward communicates, but the other ranks do not trace and would not answer."""


def caller_modes() -> tuple[Any, ...]:
    """Return the modes that code may read, so that a trace holds for them only: gradients and autocast.

    Example:
        >>> caller_modes()
        (True,)
        >>> with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ...     caller_modes()
        (False, ('cpu', torch.bfloat16))
    """
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    gradients = torch.is_grad_enabled()
    return (gradients,) if kind is None else (gradients, (kind, torch.get_autocast_dtype(kind)))


@contextmanager
def attributes_restored(root: nn.Module) -> Iterator[dict[str, str]]:
    """Restore changes of code to modules, objects and globals, except for the random state.

    Yields:
        After the block: one changed attribute by the fully qualified name of each module. A change outside of
        modules counts as the root's.
    """
    names = {module: name for name, module in root.named_modules()}
    state = PythonState(root, looks_into=is_users_own)
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for module, name in state.restore():
            changed["" if module is None else names.get(module, "")] = name


@contextmanager
def state_restored(root: nn.Module, *more: Tensor) -> Iterator[None]:
    """Restore the same, and the contents of the tensors that code reaches and of `more`."""
    state = PythonState(root, looks_into=is_users_own)
    try:
        with state.contents_restored(*more):
            yield
    finally:
        state.restore()


@contextmanager
def parameters_restored(root: nn.Module) -> Iterator[None]:
    """Restore parameters that code writes or gives other data, as a memory bank or a weight norm does."""
    able = (p for p in root.parameters() if not (p.is_meta or p.is_inference()))
    held = [(parameter, parameter.detach()) for parameter in able if _has_memory(parameter.detach())]
    writes = _Writes([data for _, data in held])
    with versions_kept([parameter for parameter, _ in held]):
        try:
            with writes:
                yield
        finally:
            for data, content in writes.saved:
                data.copy_(content)
            # In this order: writes went to the old memory, which the parameter gets back afterwards.
            for parameter, data in held:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a tensor before the first write to its memory, because copies of all tensors would be large.

    Attributes:
        saved: Each tensor that may have been written, with its content before.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: list[tuple[Tensor, Tensor]] = []
        self._tensors: dict[int, list[Tensor]] = {}
        # By memory: a write through any view changes every tensor of that storage.
        for tensor in tensors:
            self._tensors.setdefault(_memory_of(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        if _has_memory(written):
            self.saved += [(each, each.clone()) for each in self._tensors.pop(_memory_of(written), ())]


def _has_memory(value: Any) -> bool:
    """Return True for a plain strided tensor, which has one storage."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def running(root: nn.Module) -> Iterator[None]:
    """Run the real forward on a sample, and restore the contents of all tensors.

    The caller's grad mode stays, because code may read it. Hooks do not run.
    """
    with ExitStack() as stack:
        restored = state_restored(root, *root.buffers())
        shapes_known = replaced(*lstm_replaced())
        for context in (
            *(forked(), restored, parameters_restored(root)),
            *(hooks_removed(root), collectives_refused(), shapes_known),
        ):
            stack.enter_context(context)
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(_Watch())  # type: ignore[no-untyped-call]
        yield


def hooks_of_the_user(module: nn.Module) -> bool:
    """Return True if a submodule has hooks that a program would not call."""
    return any(not _is_traced(hook) for kind in _HOOKS for hook in getattr(module, kind, {}).values())


def _is_traced(hook: Callable[..., Any]) -> bool:
    """Return True for hooks of transformers, which collect hidden states within one call."""
    return getattr(hook, "__module__", "").startswith("transformers.utils.")


@contextmanager
def hooks_removed(root: nn.Module) -> Iterator[None]:
    """Remove the user's hooks on submodules, because a trace is no call."""
    saved = [(vars(module), kind, vars(module)[kind]) for module in root.modules() for kind in _HOOKS]
    none: dict[str, Any] = {f"_global{kind}": OrderedDict() for kind in _HOOKS}
    try:
        for space, kind, hooks in saved:
            space[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if _is_traced(hook))
        with replaced(torch_module, none):
            yield
    finally:
        for space, kind, hooks in saved:
            space[kind] = hooks


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Raise a `CommunicationError` if this thread starts a collective, instead of waiting forever."""
    if not dist.is_available():
        yield
        return
    tracing = threading.get_ident()

    def refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracing:  # another thread, such as a save in the background
                return real(*args, **kwargs)
            raise _communicates(name or args[1])

        return method

    group = dist.ProcessGroup
    # On the classes, not on the group: user code may hold any group, and `CollectiveOrder` starts the
    # collectives behind a read of a sharded parameter.
    names = [name for name in dir(group) if name.startswith(_COLLECTIVES)]
    with (
        replaced(group, {name: refusing(name, getattr(group, name)) for name in names}),
        replaced(CollectiveOrder, {"arrive": refusing("", CollectiveOrder.arrive)}),
    ):
        yield


def is_collective(operator: Any) -> bool:
    """Return True if a torch operator communicates."""
    return "c10d" in getattr(operator, "namespace", "")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives that are torch operators, which call their group without Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            raise _communicates(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def _communicates(name: str) -> CommunicationError:
    return CommunicationError(f"it communicates with other ranks ({name.strip('_')})")


class _NoTrainer:
    """Replaces the Trainer, whose counters change with each step while a program does not."""

    def __getattr__(self, name: str) -> Any:
        raise Refusal(f"it reads {name!r} of the Trainer, which a program could not do in each step")


@contextmanager
def noticing(root: nn.Module) -> Iterator[None]:
    """Raise a Refusal if the forward does something that a graph would silently lose."""

    def checkpoint(*_: Any, **__: Any) -> None:
        raise Refusal("it calls torch.utils.checkpoint, which a trace would drop")

    def log(*_: Any, **__: Any) -> None:
        raise Refusal("it logs within the forward, which a program could not repeat")

    # Up to torch 2.13 a class method; from 2.14 on a C method, which the class above defines.
    real_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(("torch._", "torch.library")) or saves_inputs_only(cls):
            return real_apply.__get__(None, cls)(*args, **kwargs)
        raise Refusal(f"it calls the autograd function {cls.__qualname__}, whose backward a trace would lose")

    with ExitStack() as stack:
        if root.training:  # without a backward a checkpoint saves no memory, and a trace may drop it
            stack.enter_context(replaced(torch.utils.checkpoint, checkpoints_replaced(checkpoint)))
        stack.enter_context(replaced(*lstm_replaced()))
        stack.enter_context(replaced(torch.autograd.Function, {"apply": classmethod(apply)}))
        loggers = {name: log for name in ("log", "log_dict") if hasattr(type(root), name)}
        stack.enter_context(replaced(root, loggers))
        for module in root.modules():
            # `__getattr__` of a stand-in makes every read of the Trainer an error at its own line of the
            # user's code.
            owners = {name: _NoTrainer() for name in ("_trainer", "_fabric") if vars(module).get(name)}
            stack.enter_context(replaced(module, owners))
        before = _states()
        yield
        if _states() != before:
            raise Refusal("it draws from the generators of Python or numpy, or seeds torch's")


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes temporarily, without `__setattr__` of modules."""
    missing = object()
    own = vars(owner)
    saved = {name: own.get(name, missing) for name in values}
    # Classes need `setattr`: pybind11 classes, as ProcessGroup is in torch 2.11, refuse `object.__setattr__`.
    place, remove = (
        (setattr, delattr) if isinstance(owner, type) else (object.__setattr__, object.__delattr__)
    )
    try:
        for name, value in values.items():
            place(owner, name, value)
        yield
    finally:
        for name, value in saved.items():
            if value is missing:
                remove(owner, name)
            else:
                place(owner, name, value)


def _states() -> tuple[Any, ...]:
    arrays: Any = numpy.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state().numpy().tobytes()  # a trace itself draws nothing
    return random.getstate(), repr(arrays["state"]), of_torch
