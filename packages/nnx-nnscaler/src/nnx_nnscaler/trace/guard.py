"""Tracing leaves no trace: what a forward changes is put back, and what a graph could not repeat is noticed.

Owns random states, attributes, buffers and hooks of modules while they are traced or run on a sample, and
the detection of side effects, collectives, `torch.utils.checkpoint` and custom autograd functions.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from nnx_core.random_state import forked
from nnx_nnscaler.trace.fingerprint import is_users_own, read_by_forward
from nnx_nnscaler.trace.structure import Refusal, is_constant

# Bookkeeping of nn.Module, and a flag of transformers that goes with hooks which are not put back either.
_SKIPPED = {
    "training",
    "_parameters",
    "_modules",
    "_non_persistent_buffers_set",
    "_output_capturing_hooks_installed",
}
# Recurrent layers of torch keep their parameters in lists too, which follow every exchange of parameters.
_SILENT = {"_flat_weights", "_flat_weight_refs"}
_SKIPPED |= {name for name in vars(nn.Module()) if "hook" in name}

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
    """Put attributes of every module, and globals that code reads, back as they were, with what is in them.

    Yields:
        After the block: fully qualified name of every module with a changed attribute to that attribute;
        a global counts as one of the root's.
    """
    attributes: dict[str, Any] = {name: vars(module) for name, module in root.named_modules()}
    before = {name: _snapshot(held) for name, held in attributes.items()}
    spaces = {id(held) for held in attributes.values()}
    outside = [(space, name) for space, name in read_by_forward(root) if id(space) not in spaces]
    globals_before = [(space, name, space.get(name), _Contents(space.get(name))) for space, name in outside]
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for name, saved in before.items():
            found = _restore(attributes[name], saved)
            if found:
                changed[name] = found
        for space, name, value, contents in globals_before:
            differs = not _equal(space.get(name), value)
            if differs and isinstance(space, dict):
                space[name] = value
            if contents.put_back() or differs:
                changed[""] = name


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, _Contents]]:
    return {key: (value, _Contents(value)) for key, value in attributes.items() if key not in _SKIPPED}


def _restore(attributes: dict[str, Any], saved: dict[str, tuple[Any, _Contents]]) -> str:
    """Put a module's attributes back; the name of one that had changed, or nothing."""
    changed = ""
    for key in [key for key in attributes if key not in saved and key not in _SKIPPED]:
        del attributes[key]
        changed = key
    for key, (value, contents) in saved.items():
        now = attributes.get(key, saved)
        attributes[key] = value
        differs = not _equal(now, value)
        if (contents.put_back() or differs) and key not in _SILENT:
            changed = key
    return changed


def _equal(now: Any, value: Any) -> bool:
    """Whether two attributes mean the same; torch makes new containers of the same content."""
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if isinstance(value, (tuple, list, deque)):
        return len(now) == len(value) and all(map(_equal, now, value))
    return is_constant(value) and bool(now == value)


class _Contents:
    """What is in the containers, and the objects of the user's own classes, that a value leads to."""

    def __init__(self, value: Any) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}
        left = [value]
        while left:
            one = left.pop()
            container = vars(one) if hasattr(one, "__dict__") and _is_object_of_user(one) else one
            if isinstance(container, (list, deque, dict, set)) and id(container) not in self._held:
                self._held[id(container)] = container, copy(container)
                left += container.values() if isinstance(container, dict) else container
            elif isinstance(container, tuple):
                left += container

    def put_back(self) -> bool:
        """Put it back; whether it had changed."""
        changed = [(now, before) for now, before in self._held.values() if not _same_content(now, before)]
        for now, before in changed:
            now.clear()
            (now.update if isinstance(now, (dict, set)) else now.extend)(before)
        return bool(changed)


def _is_object_of_user(value: Any) -> bool:
    return not isinstance(value, (nn.Module, type)) and is_users_own(type(value).__module__)


def _same_content(now: Any, before: Any) -> bool:
    if isinstance(before, set):
        return bool(now == before)
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(_equal(now[key], before[key]) for key in before)
    return _equal(now, before)


@contextmanager
def running(root: nn.Module) -> Iterator[None]:
    """Run the real forward on a sample and leave nothing of it: buffers get their contents back.

    Gradients are recorded or not as the caller has it, for the code may ask. Hooks do not run.
    """
    saved = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    contexts = (forked(), attributes_restored(root), hooks_removed(root), collectives_refused())
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(_Watch())  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, content in saved:
                    buffer.copy_(content)


# --- hooks ----------------------------------------------------------------------------------------------


def hooks_of_the_user(module: nn.Module) -> bool:
    """Whether a submodule has hooks that a program would not call by itself."""
    return any(not _is_traced(hook) for kind in _HOOKS for hook in getattr(module, kind, {}).values())


def _is_traced(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of transformers', which collect hidden states within one call."""
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


# --- collectives ----------------------------------------------------------------------------------------


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
            raise _communicates(name)

        return method

    group = dist.ProcessGroup
    names = [name for name in dir(group) if name.startswith(_COLLECTIVES)]
    with replaced(group, {name: refusing(name, getattr(group, name)) for name in names}):
        yield


def is_collective(operator: Any) -> bool:
    """Whether a torch operator communicates."""
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

    real_apply = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(("torch._", "torch.library")):
            return real_apply(cls, *args, **kwargs)
        raise Refusal(f"it calls the autograd function {cls.__qualname__}, whose backward a trace would lose")

    with ExitStack() as stack:
        if root.training:  # elsewhere there is no backward that it would save memory for
            reentrant = type("CheckpointFunction", (), {"apply": staticmethod(checkpoint)})
            names = {"_checkpoint_without_reentrant_generator": checkpoint, "CheckpointFunction": reentrant}
            stack.enter_context(replaced(torch.utils.checkpoint, names))
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
    place = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    try:
        for name, value in values.items():
            place(owner, name, value)
        yield
    finally:
        for name, value in saved.items():
            if value is missing:
                (type.__delattr__ if isinstance(owner, type) else object.__delattr__)(owner, name)
            else:
                place(owner, name, value)


def _states() -> tuple[Any, ...]:
    arrays: Any = numpy.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state().numpy().tobytes()  # a trace draws nothing
    return random.getstate(), repr(arrays["state"]), of_torch
