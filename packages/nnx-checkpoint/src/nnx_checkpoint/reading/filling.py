"""Fill a model and its optimizers in place and by name from a checkpoint.

Nothing is cast silently. Each rank reads its own shards; `nnx_core.lightning.checkpoint` raises on all ranks
if one fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.reading.naming import LazyStateDict, OptimizerState, StoredName
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.state import ModelState, parameter_names

log = logging.getLogger("nnx.checkpoint")

OTHER_MODEL = (
    "Build the model as it was when it was saved, rename keys in `on_load_checkpoint`, or set "
    "`strict_loading=False` on the LightningModule to load only the names that match."
)


def fill_model(
    module: nn.Module,
    state: ModelState,
    source: Mapping[str, Any],
    *,
    strict: bool,
    remedy: str = OTHER_MODEL,
) -> None:
    """Fill a module's shards in place from a state dict, lazy or complete.

    Args:
        module: The module whose extra state is set.
        state: This rank's handles, from `Backend.model_state`.
        source: A `LazyStateDict`, or a mapping of unsharded tensors and shards of the same boxes.
        strict: Refuse missing and unexpected names; shapes must match either way.
        remedy: The remedy of errors about differing names or shapes.

    Raises:
        CheckpointError: Names or shapes differ; the message lists all of them.
    """
    missing, unexpected, shapes = differences(state, source)
    if shapes or (strict and (missing or unexpected)):
        raise _another_model(missing, unexpected, shapes, remedy)
    lazy: dict[str, Shard] = {}
    for name, found in _found_names(state, source):
        if found is None:
            continue
        shard = state.tensors[name]
        key = source.untouched(found) if isinstance(source, LazyStateDict) else None
        if key is None:
            _fill(shard, source[found])
        else:
            lazy[key] = shard
    if isinstance(source, LazyStateDict):
        _fill_casting(source.stored, lazy)
    for name in state.extra:
        if name in source:
            prefix = name.removesuffix("_extra_state").removesuffix(".")
            module.get_submodule(prefix).set_extra_state(source[name])


def _fill(shard: Shard, value: Tensor | Shard) -> None:
    """Fill a shard from an unsharded tensor, or from another process's shard of the same boxes."""
    if isinstance(value, Shard):
        shard.copy_from(value)
    else:
        shard.fill_from(value)


def _found_names(state: ModelState, source: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return each tensor's name, and the name (of tied ones) that the source has, or None."""
    names = {name: [name] for name in state.tensors}
    for alias, stored in state.aliases.items():
        names.setdefault(stored, []).append(alias)
    return [(name, next((each for each in names[name] if each in source), None)) for name in state.tensors]


def differences(state: ModelState, source: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the missing names, the unexpected names, and the differing shapes of a source."""
    found_names = _found_names(state, source)
    missing = [name for name, found in found_names if found is None]
    missing += [name for name in state.extra if name not in source]
    known = {*state.tensors, *state.aliases, *state.extra}
    unexpected = [name for name in source if name not in known]
    shapes = []
    for name, found in found_names:
        if found is None:
            continue
        shape = state.tensors[name].shape
        stored = source.shape(found) if isinstance(source, LazyStateDict) else tuple(source[found].shape)
        if stored != shape:
            shapes.append(f"{name} is {stored} in the checkpoint and {shape} in the model")
    return missing, unexpected, shapes


def _another_model(
    missing: list[str], unexpected: list[str], shapes: list[str], remedy: str
) -> CheckpointError:
    parts = [
        f"{title}: {_shorten(names)}"
        for title, names in (
            ("missing in the checkpoint", missing),
            ("unexpected in the checkpoint", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    return CheckpointError(
        f"the checkpoint is of another model; {'; '.join(parts)}.",
        remedy=remedy,
    )


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _fill_casting(stored: Checkpoint, shards: Mapping[str, Shard]) -> None:
    """Fill shards in place; read and convert tensors that are stored in another floating dtype."""
    exact: dict[str, Shard] = {}
    cast: dict[str, Shard] = {}
    for key, shard in shards.items():
        same = stored.entry(key).dtype == shard.dtype
        (exact if same else cast)[key] = shard
    stored.fill(exact)
    if cast and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning(
            "Converting %d tensors that were saved in another dtype: %s", len(cast), _shorten([*cast])
        )
    for key, shard in cast.items():
        dtype = stored.entry(key).dtype
        if not (dtype.is_floating_point and shard.dtype.is_floating_point):
            raise CheckpointError(
                f"{key} is {dtype} in the checkpoint and {shard.dtype} in the model.",
                remedy="Convert it in `on_load_checkpoint`, or build the model with the saved dtype.",
            )
        for box, view in zip(shard.boxes, shard.data, strict=True):
            view.copy_(stored.read(key, box))


class AllocatesState(Protocol):
    """The methods of `Backend` that allocate and describe an optimizer's state."""

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Describe an optimizer's state; see `Backend.optimizer_state`."""
        ...

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Allocate a state tensor; see `Backend.new_optimizer_state`."""
        ...


def fill_optimizer(
    backend: AllocatesState, module: nn.Module, optimizer: Optimizer, saved: OptimizerState
) -> None:
    """Restore an optimizer in place, by parameter name; allocate its missing state.

    Args:
        backend: The backend, which allocates and describes state tensors.
        module: The module that owns the parameters.
        optimizer: The optimizer to restore.
        saved: The saved state: values are `StoredName`, unsharded tensors, shards of the same boxes, or
            other values.

    Raises:
        CheckpointError: The param groups differ from the saved ones.
    """
    names = parameter_names(module)
    restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in saved["state"].get(names[parameter], {}).items():
                optimizer.state[parameter][name] = _place(backend, parameter, name, value, group)
    fill_optimizer_tensors(backend.optimizer_state(module, optimizer), saved)


def _place(
    backend: AllocatesState, parameter: nn.Parameter, name: str, value: Any, group: Mapping[str, Any]
) -> Any:
    if not isinstance(value, (StoredName, Tensor, Shard)):
        return value
    return backend.new_optimizer_state(
        parameter, name, shape=tuple(value.shape), dtype=_state_dtype(parameter, name, value), group=group
    )


def _state_dtype(parameter: nn.Parameter, name: str, value: StoredName | Tensor | Shard) -> torch.dtype:
    """Return the saved dtype; if it was the parameter's, return the parameter's current dtype."""
    if not (value.dtype.is_floating_point and parameter.dtype.is_floating_point) or name == "step":
        return value.dtype
    if isinstance(value, Shard):
        return value.dtype  # of the same run
    if isinstance(value, Tensor):
        return parameter.dtype  # as `Optimizer.load_state_dict` does
    saved = value.parameter_dtype
    return parameter.dtype if saved == value.dtype else value.dtype


def fill_optimizer_tensors(state: OptimizerState, saved: OptimizerState) -> None:
    """Fill state tensors that exist already.

    Args:
        state: This rank's handles, from `Backend.optimizer_state`.
        saved: The source of each, by the same names: a `StoredName`, an unsharded tensor, or a shard of the
            same boxes.
    """
    lazy: dict[str, Shard] = {}
    source: Checkpoint | None = None
    for parameter, entries in state["state"].items():
        for name, shard in entries.items():
            value = saved["state"][parameter][name]
            if isinstance(value, StoredName):
                lazy[value.key] = shard
                source = value.stored
            elif isinstance(value, (Tensor, Shard)):
                _fill(shard, value)
    if source is not None:
        _fill_casting(source, lazy)


def restore_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Restore the options of an optimizer's param groups, such as learning rates.

    Args:
        optimizer: The optimizer with the groups to fill.
        names: The names of its parameters.
        saved: The groups of a checkpoint, with the names of their parameters under ``params``.

    Raises:
        CheckpointError: The number or the parameters of the groups differ.
    """
    current = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if len(current) != len(saved):
        raise CheckpointError(
            f"{type(optimizer).__name__} has {len(current)} param groups and the checkpoint has "
            f"{len(saved)}.",
            remedy="Build the optimizer in `configure_optimizers` as it was when the checkpoint was saved.",
        )
    for index, (group, mine, theirs) in enumerate(zip(optimizer.param_groups, current, saved, strict=True)):
        differing = sorted(set(mine).symmetric_difference(theirs["params"]))
        if differing:
            raise CheckpointError(
                f"param group {index} of {type(optimizer).__name__} holds other parameters than in the "
                f"checkpoint; they differ in {_shorten(differing)}.",
                remedy="Group the parameters in `configure_optimizers` as they were when it was saved.",
            )
        group.update({key: value for key, value in theirs.items() if key != "params"})
