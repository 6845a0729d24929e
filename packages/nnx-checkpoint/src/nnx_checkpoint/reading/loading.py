"""Load a state dict into a module, in place or through the module's own loading code.

torch loads a module by `_load_from_state_dict`, with hooks before and after it. If these are torch's own,
each rank reads its slices straight into place (`nnx_checkpoint.reading.filling.fill_model`). If the user
wrote one, the module gets unsharded tensors, in the order and under the names of `nn.Module.load_state_dict`.
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
from nnx_base.shard import Shard
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
        source: A `LazyStateDict`, or a mapping of unsharded tensors and shards of the same boxes; it is not
            changed.
        strict: Refuse missing and unexpected names; shapes must match either way.
        remedy: The remedy of errors about differing names or shapes.
        group: The ranks that load together; None for this process alone.
        device: The device of tensors that are neither parameters nor buffers.
        filled: Function called after the in-place reads, before the module's own code sees its weights.

    Raises:
        CheckpointError: Names or shapes differ; the message lists all of them.
    """
    source = _fitted(source, state)
    prefixes = _self_loading(module, state)
    ordinary, rest = _without(state, source, prefixes)
    has_hooks = any(has_load_hooks(each) for each in module.modules())
    with together(group, doing="restoring the model"):
        missing, unexpected, _ = differences(ordinary, rest)
        fill_model(module, ordinary, rest, strict=strict and not has_hooks, remedy=remedy)
    filled()
    if not prefixes and not has_hooks:
        return
    with together(group, doing="reading the entries of the model's own loading code"):
        complete = {prefix: _complete(module, prefix, source, device) for prefix in prefixes}
    with together(group, doing="running the model's own loading code"), _naming(module):
        if overrides_load_state_dict(module):
            module.load_state_dict(complete[""], strict=strict)
        else:
            _OwnLoading(complete, missing, unexpected).load(module, strict=strict)


def _fitted(source: Mapping[str, Any], state: ModelState) -> Mapping[str, Any]:
    """Return the state dict with the prefix under which the module holds the model, if its names lack one."""
    if not isinstance(source, LazyStateDict) or not source.stored.omits_prefix:
        return source
    names = {*state.tensors, *state.aliases, *state.extra}
    if not source or all(name in names for name in source):
        return source
    first = next(iter(source))
    prefixes = [name.removesuffix(first) for name in sorted(names) if name.endswith(f".{first}")]
    fitting = [prefix for prefix in prefixes if all(prefix + name in names for name in source)]
    if len(fitting) > 1:
        raise CheckpointError(
            f"'{source.stored.path}' fits {len(fitting)} parts of the module: {', '.join(fitting)}.",
            remedy="Load each part by itself: `nnx_checkpoint.load(path, model=module.part)`.",
        )
    return source.prefixed(fitting[0]) if fitting else source


def _self_loading(module: nn.Module, state: ModelState) -> tuple[str, ...]:
    """Return the prefixes of names that user code loads; an empty prefix means all."""
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
    """Return the innermost submodule that an entry may belong to, and the prefix of its names."""
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
    """Return state and source without some prefixes, and without copies (filling those changes nothing)."""
    kept = [name for name in state.tensors if not name.startswith(prefixes)]
    extra = {name: None for name in kept if is_extra_state(name)}  # tensors that a hook returned
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
    """Read all entries under a prefix into CPU memory, and extra entries onto `device`."""
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    held |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    names = [name for name in source if name.startswith(prefix)]
    return {name: _moved(_read(source, name), None if name in held else device) for name in names}


def _read(source: Mapping[str, Any], name: str) -> Any:
    key = source.untouched(name) if isinstance(source, LazyStateDict) else None
    if isinstance(source, LazyStateDict) and key is not None:
        return source.stored.read(key)  # `source` does not keep it in memory
    value = source[name]
    if isinstance(value, Shard):
        raise CheckpointError(
            f"the model loads {name} by its own code, which needs it unsharded, and here are shards of it.",
            remedy="Load it from a checkpoint.",
        )
    return value


def _moved(value: Any, device: torch.device | None) -> Any:
    """Return a tensor, or the tensors in a list, on a device."""
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
    except Exception as error:  # user code may raise anything
        raise CheckpointError(
            f"{type(module).__name__} refused its entries of the checkpoint: {type(error).__name__}: "
            f"{' '.join(str(error).split()).rstrip('.')}.",
            remedy="Build the model as it was when it was saved, or rename keys in `on_load_checkpoint`.",
        ) from error


@dataclass(slots=True)
class _OwnLoading:
    """Loads complete tensors through the code of modules, and calls hooks, as torch does.

    Attributes:
        complete: The unsharded entries to load, by prefix.
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
