"""Tracing leaves no trace: what a forward changes is put back, and what a graph could not repeat is noticed.

Owns random states, attributes and buffers of modules while they are traced or run on a sample, and the
detection of side effects, `torch.utils.checkpoint` and custom autograd functions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torch import nn

from nnx_nnscaler.trace.inputs import is_constant
from nnx_nnscaler.trace.structure import Refusal

__all__ = ["attributes_restored", "noticing", "random_states_forked", "running"]

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


@contextmanager
def random_states_forked() -> Iterator[None]:
    """Draw nothing from the generators of torch, Python and numpy."""
    python, arrays = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


@contextmanager
def attributes_restored(root: nn.Module) -> Iterator[dict[str, str]]:
    """Put attributes of every module back as they were; yields a dict that is filled at the end.

    Yields:
        After the block: fully qualified name of every module with a changed attribute to that attribute.
    """
    before = {name: _snapshot(module) for name, module in root.named_modules()}
    modules = dict(root.named_modules())
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for name, saved in before.items():
            found = _restore(modules[name], saved)
            if found:
                changed[name] = found


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {key: (value, _copied(value)) for key, value in vars(module).items() if key not in _SKIPPED}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: (item, _copied(item)) for key, item in value.items()}
    if isinstance(value, list):
        return [(item, _copied(item)) for item in value]
    return None


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> str:
    """Put a module's attributes back; the name of one that had changed, or nothing."""
    changed = ""
    attributes = vars(module)
    for key in [key for key in attributes if key not in saved and key not in _SKIPPED]:
        del attributes[key]
        changed = key
    for key, (value, copy) in saved.items():
        now = attributes.get(key, saved)
        attributes[key] = value
        differs = not _equal(now, value)
        if (_refilled(value, copy) or differs) and key not in _SILENT:
            changed = key
    return changed


def _equal(now: Any, value: Any) -> bool:
    """Whether two attributes mean the same; torch makes new containers of the same content."""
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if isinstance(value, (tuple, list)):
        return len(now) == len(value) and all(map(_equal, now, value))
    return is_constant(value) and bool(now == value)


def _refilled(value: Any, copy: Any) -> bool:
    """Put the contents of a container back; whether they had changed."""
    if isinstance(value, dict):
        same = value.keys() == copy.keys() and all(
            _equal(value[key], item) for key, (item, _) in copy.items()
        )
        inner = [_refilled(item, nested) for item, nested in copy.values()]
        if not same:
            value.clear()
            value.update({key: item for key, (item, _) in copy.items()})
        return not same or any(inner)
    if isinstance(value, list):
        same = len(value) == len(copy) and all(map(_equal, value, (item for item, _ in copy)))
        inner = [_refilled(item, nested) for item, nested in copy]
        if not same:
            value[:] = [item for item, _ in copy]
        return not same or any(inner)
    return False


@contextmanager
def running(root: nn.Module) -> Iterator[None]:
    """Run the real forward on a sample and leave nothing of it: buffers get their contents back."""
    saved = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    with random_states_forked(), torch.no_grad(), attributes_restored(root):
        try:
            yield
        finally:
            for buffer, content in saved:
                buffer.copy_(content)


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
            stack.enter_context(_replaced(torch.utils.checkpoint, names))
        stack.enter_context(_replaced(torch.autograd.Function, {"apply": classmethod(apply)}))
        loggers = {name: log for name in ("log", "log_dict") if hasattr(type(root), name)}
        stack.enter_context(_replaced(root, loggers))
        before = _states()
        yield
        if _states() != before:
            raise Refusal("it draws from the generators of Python or numpy")


@contextmanager
def _replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
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


def _states() -> tuple[Any, bytes]:
    arrays: Any = numpy.random.get_state(legacy=False)
    return random.getstate(), repr(arrays["state"]).encode()
