"""Tracing leaves no trace: what a forward changes is put back, and what a graph could not repeat is noticed.

Owns random states, attributes, buffers and hooks of modules while they are traced or run on a sample, and
the detection of side effects, collectives, `torch.utils.checkpoint` and custom autograd functions: when they
happen, or by the names in the code that a forward reaches.
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
from nnx_core.view.python_state import PythonState, is_users_own
from nnx_nnscaler._torch_compat import checkpoints_replaced, lstm_replaced, saves_inputs_only
from nnx_nnscaler.trace.structure import Refusal

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COLLECTIVES = (
    *("all", "_allgather", "barrier", "broadcast", "gather", "monitored_barrier"),
    *("recv", "reduce", "_reduce_scatter", "scatter", "send"),
)
"""How the methods of a process group that communicate begin; the others ask for its name, size and so on."""


class CommunicationError(Refusal):
    """The forward communicates, and the other ranks, which do not trace, would not answer."""


def caller_modes() -> tuple[Any, ...]:
    """The modes that code may ask for, so that a trace holds for them only: of gradients and of autocast.

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
    """Put what code changes of modules, of objects and of globals back as it was; the random state apart.

    Yields:
        After the block: fully qualified name of every module with a changed attribute to that attribute;
        what belongs to no module counts as the root's.
    """
    names = {module: name for name, module in root.named_modules()}
    state = PythonState(root, looks_into=is_users_own)
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for module, name in state.put_back():
            changed["" if module is None else names.get(module, "")] = name


@contextmanager
def state_restored(root: nn.Module, *more: Tensor) -> Iterator[None]:
    """Put all of that back, and what is written into the tensors that code reaches and into more tensors."""
    state = PythonState(root, looks_into=is_users_own)
    try:
        with state.contents_restored(*more):
            yield
    finally:
        state.put_back()


@contextmanager
def parameters_restored(root: nn.Module) -> Iterator[None]:
    """Put parameters back that code writes or gives other data, as a memory bank or a weight norm does."""
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
            for parameter, data in held:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies tensors before the first operator that writes into their memory: a copy of all would be large.

    Attributes:
        saved: Each tensor that may have been written, and its content before.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: list[tuple[Tensor, Tensor]] = []
        self._tensors: dict[int, list[Tensor]] = {}
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
    """Run the real forward on a sample and leave nothing of it: tensors get their contents back.

    Gradients are recorded or not as the caller has it, for the code may ask. Hooks do not run.
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
    """Return True if a submodule has hooks that a program would not call by itself."""
    return any(not _is_traced(hook) for kind in _HOOKS for hook in getattr(module, kind, {}).values())


def _is_traced(hook: Callable[..., Any]) -> bool:
    """Return True if a hook is one of transformers', which collect hidden states within one call."""
    return getattr(hook, "__module__", "").startswith("transformers.utils.")


@contextmanager
def hooks_removed(root: nn.Module) -> Iterator[None]:
    """Call nothing that the user hooked to calls of submodules: a trace is no call."""
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
    """Raise a `CommunicationError` where this thread starts a collective, instead of waiting forever."""
    if not dist.is_available():
        yield
        return
    tracing = threading.get_ident()

    def refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracing:  # a save in the background, say
                return real(*args, **kwargs)
            raise _communicates(name or args[1])

        return method

    group = dist.ProcessGroup
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
    """Refuses collectives that are torch operators, which reach their group without Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            raise _communicates(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def _communicates(name: str) -> CommunicationError:
    return CommunicationError(f"it communicates with other ranks ({name.strip('_')})")


class _NoTrainer:
    """Stands for the Trainer, whose counters change from step to step while a program stays as it is."""

    def __getattr__(self, name: str) -> Any:
        raise Refusal(f"it asks the Trainer for {name!r}, which a program could not do in each step")


@contextmanager
def noticing(root: nn.Module) -> Iterator[None]:
    """Raise a Refusal where the forward does what a graph would lose without a word."""

    def checkpoint(*_: Any, **__: Any) -> None:
        raise Refusal("it calls torch.utils.checkpoint, which a trace would drop")

    def log(*_: Any, **__: Any) -> None:
        raise Refusal("it logs within the forward, which a program could not repeat")

    # A class method up to torch 2.13, and one of C from 2.14 on, where the class above defines it.
    real_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(("torch._", "torch.library")) or saves_inputs_only(cls):
            return real_apply.__get__(None, cls)(*args, **kwargs)
        raise Refusal(f"it calls the autograd function {cls.__qualname__}, whose backward a trace would lose")

    with ExitStack() as stack:
        if root.training:  # elsewhere there is no backward that it would save memory for
            stack.enter_context(replaced(torch.utils.checkpoint, checkpoints_replaced(checkpoint)))
        stack.enter_context(replaced(*lstm_replaced()))
        stack.enter_context(replaced(torch.autograd.Function, {"apply": classmethod(apply)}))
        loggers = {name: log for name in ("log", "log_dict") if hasattr(type(root), name)}
        stack.enter_context(replaced(root, loggers))
        for module in root.modules():
            owners = {name: _NoTrainer() for name in ("_trainer", "_fabric") if vars(module).get(name)}
            stack.enter_context(replaced(module, owners))
        before = _states()
        yield
        if _states() != before:
            raise Refusal("it draws from the generators of Python or numpy, or seeds torch's")


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes for a while; goes past `__setattr__` of modules."""
    missing = object()
    own = vars(owner)
    saved = {name: own.get(name, missing) for name in values}
    # Classes by their own rules: those of pybind11, as ProcessGroup is in torch 2.11, take no others.
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
    of_torch = torch.default_generator.get_state().numpy().tobytes()  # a trace draws nothing
    return random.getstate(), repr(arrays["state"]), of_torch
