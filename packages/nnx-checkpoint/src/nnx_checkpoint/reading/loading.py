"""Filling a module: in place where a copy will do, and through the module's own code where it loads itself.

Torch loads a module by `_load_from_state_dict`, with hooks before and after it. Where these are torch's own,
each rank reads its slices straight into place (`nnx_checkpoint.reading.filling.fill_model`). Where the user
wrote one, the module gets complete tensors, in the order and with the names that `nn.Module.load_state_dict`
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_base.errors import CheckpointError, NnxError
from nnx_base.ranks import together
from nnx_checkpoint._torch_compat import (
    call_load_hooks,
    has_load_hooks,
    loads_itself,
    overrides_load_state_dict,
    overrides_loading,
)
from nnx_checkpoint.reading.filling import OTHER_MODEL, differences, fill_model
from nnx_checkpoint.reading.naming import LazyStateDict
from nnx_checkpoint.reading.state import ModelState, is_extra_state

__all__ = ["load_model"]


def load_model(
    module: nn.Module,
    state: ModelState,
    source: Mapping[str, Any],
    *,
    strict: bool,
    remedy: str = OTHER_MODEL,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    filled: Callable[[], None] = lambda: None,
) -> None:
    """Load a state dict as ``module.load_state_dict`` does. Collective over `group`.

    Args:
        module: The module, laid out or not.
        state: This rank's handles, from `Backend.model_state`.
        source: A `LazyStateDict` or a mapping of complete tensors; it is not changed.
        strict: Refuse missing and unexpected names; shapes must match either way.
        remedy: The remedy of an error that names or shapes differ.
        group: The ranks that load together; None for this process alone.
        device: Where tensors go that are neither parameters nor buffers.
        filled: Called when the in-place part is over, before the module's own code looks at its weights.

    Raises:
        CheckpointError: With every missing and unexpected name and every shape that differs.
    """
    prefixes = _self_loading(module, state)
    ordinary, rest = _without(state, source, prefixes)
    has_hooks = any(has_load_hooks(each) for each in module.modules())
    with together(group, doing="restoring the model"):
        missing, unexpected, _ = differences(ordinary, rest)
        fill_model(module, ordinary, rest, strict=strict and not has_hooks, remedy=remedy)
    filled()
    if not prefixes and not has_hooks:
        return
    with together(group, doing="reading what the model loads by itself"):
        complete = {prefix: _complete(module, prefix, source, device) for prefix in prefixes}
    with together(group, doing="loading what the model loads by itself"), _naming(module):
        if overrides_load_state_dict(module):
            module.load_state_dict(complete[""], strict=strict)
        else:
            _OwnLoading(complete, missing, unexpected).load(module, strict=strict)


def _self_loading(module: nn.Module, state: ModelState) -> tuple[str, ...]:
    """Return the prefixes of names that user code has to load; an empty prefix stands for all."""
    if overrides_load_state_dict(module):
        return ("",)
    found: list[str] = []
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if loads_itself(part) and not prefix.startswith(tuple(found)):
            found.append(prefix)
    for name in sorted(state.copies):
        prefix, owner = _owner(module, name)
        local = name.removeprefix(prefix)
        is_tensor = local in owner._parameters or local in owner._buffers
        if (is_tensor or overrides_loading(owner)) and not prefix.startswith(tuple(found)):
            found.append(prefix)
    return tuple(found)


def _owner(module: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The innermost submodule that an entry may belong to, and what its names begin with."""
    prefix, rest = "", name
    while "." in rest:
        first, _, after = rest.partition(".")
        inner = module._modules.get(first)
        if inner is None:
            break
        prefix, rest, module = f"{prefix}{first}.", after, inner
    return prefix, module


def _without(
    state: ModelState, source: Mapping[str, Any], prefixes: tuple[str, ...]
) -> tuple[ModelState, Mapping[str, Any]]:
    """State and source without what begins so, and without copies, which to fill would change nothing."""
    kept = [name for name in state.tensors if not name.startswith(prefixes)]
    extra = {name: None for name in kept if is_extra_state(name)}  # tensors that a module gives as such
    ordinary = ModelState(
        tensors={name: state.tensors[name] for name in kept if name not in state.copies},
        aliases={name: stored for name, stored in state.aliases.items() if not name.startswith(prefixes)},
        extra={**{name: value for name, value in state.extra.items() if is_extra_state(name)}, **extra},
    )
    for name in [name for name in ordinary.extra if name.startswith(prefixes)]:
        del ordinary.extra[name]
    if not isinstance(source, LazyStateDict):
        return ordinary, {name: source[name] for name in source if not name.startswith(prefixes)}
    rest = copy(source)
    for name in [name for name in source if name.startswith(prefixes)]:
        del rest[name]
    return ordinary, rest


def _complete(
    module: nn.Module, prefix: str, source: Mapping[str, Any], device: torch.device | None
) -> dict[str, Any]:
    """Read all entries under a prefix to CPU memory, but extra entries to `device`."""
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    held |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    names = [name for name in source if name.startswith(prefix)]
    return {name: _moved(_read(source, name), None if name in held else device) for name in names}


def _read(source: Mapping[str, Any], name: str) -> Any:
    key = source.untouched(name) if isinstance(source, LazyStateDict) else None
    if isinstance(source, LazyStateDict) and key is not None:
        return source.stored.read(key)  # which `source` does not go on holding
    return source[name]


def _moved(value: Any, device: torch.device | None) -> Any:
    """A tensor, or those in a list, on a device."""
    if isinstance(value, Tensor) and device is not None:
        return value.to(device)
    return [_moved(item, device) for item in value] if type(value) is list else value


@contextmanager
def _naming(module: nn.Module) -> Iterator[None]:
    """Name the module in errors of its own loading code."""
    try:
        yield
    except NnxError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise CheckpointError(
            f"{type(module).__name__} refused its entries of the checkpoint: {type(error).__name__}: "
            f"{' '.join(str(error).split()).rstrip('.')}.",
            remedy="Build the model as it was when it was saved, or rename keys in `on_load_checkpoint`.",
        ) from error


@dataclass(slots=True)
class _OwnLoading:
    """Loads complete tensors through the code of modules, and calls hooks, as torch does.

    Attributes:
        complete: The entries that are loaded here, by prefix.
        missing: Names that the checkpoint lacks; hooks may change it.
        unexpected: Names that the module lacks; hooks may change it.
        errors: torch's errors about other entries.
    """

    complete: dict[str, dict[str, Any]]
    missing: list[str]
    unexpected: list[str]
    errors: list[str] = field(default_factory=list)

    def load(self, module: nn.Module, *, strict: bool) -> None:
        """Load every module, as ``nn.Module.load_state_dict`` does."""
        self._load(module, "", None)
        if strict and self.missing:
            self.errors.append(f"missing in the checkpoint: {', '.join(self.missing)}")
        if strict and self.unexpected:
            self.errors.append(f"unexpected in the checkpoint: {', '.join(self.unexpected)}")
        if self.errors:
            raise RuntimeError("; ".join(self.errors))

    def _load(self, module: nn.Module, prefix: str, own: dict[str, Any] | None) -> None:
        own = self.complete.pop(prefix, None) if own is None else own
        if own is not None:
            module._load_from_state_dict(own, prefix, {}, True, self.missing, self.unexpected, self.errors)
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                theirs = None if own is None else {k: v for k, v in own.items() if k.startswith(inner)}
                self._load(child, inner, theirs)
        call_load_hooks(module, self.missing, self.unexpected)
