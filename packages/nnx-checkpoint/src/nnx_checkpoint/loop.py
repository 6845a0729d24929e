"""Saving and loading in a training loop of one's own: a module, optimizers, tensors and values, by name.

What is stored has the names that strategies give it, so `nnx.load_from_checkpoint` and every strategy find
the weights. Parameters may be plain tensors or DTensors, as after ``fully_shard``: a checkpoint that any
number of processes saved loads in any other number. `writer` writes and `reader` reads; this module only
gathers what to save, and hands out what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint import writer
from nnx_checkpoint.collective import control_group, together
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.formats import open_checkpoint
from nnx_checkpoint.loading import load_model
from nnx_checkpoint.naming import LazyStateDict, OptimizerState, Saved, collect, stored_optimizer_states
from nnx_checkpoint.shard import Shard, shard_of
from nnx_checkpoint.state import (
    as_state_dict,
    describe_model,
    describe_optimizer,
    fill_optimizer,
    new_state_tensor,
)
from nnx_checkpoint.storage import Location

_OPTIONS = signature(writer.save).parameters.keys() - {"path", "tensors", "objects"}


def save(
    path: Location,
    tensors: Mapping[str, Tensor | Shard] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    objects: Mapping[str, Any] | None = None,
    rank_objects: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    state_dict_type: Literal["sharded", "deduped"] = "deduped",
    provenance: Mapping[str, Any] | None = None,
    opaque: Literal["error", "pickle"] = "error",
    keep_previous: int = 0,
    collective: bool = True,
    **values: Any,
) -> None:
    """Write a checkpoint; collective over all ranks, a plain call in a single process.

    The previous checkpoint at this path stays loadable until the new one is complete and on disk.

    Args:
        path: A new or empty directory or URL, or a checkpoint to replace.
        tensors: Tensors, DTensors or shards by name, of any shapes.
        model: A module whose parameters, buffers and extra state are saved.
        optimizer: An optimizer, or several, of parameters of the model.
        objects: Everything else. Rank 0's tree is stored; tensors, DTensors and shards anywhere in it are
            lifted out.
        rank_objects: A tree of this rank alone, such as its random state; it may hold small tensors.
        aliases: Tied names that share storage with a tensor stored under another name.
        state_dict_type: ``"deduped"`` stores each box once across the world; ``"sharded"`` stores every
            rank's whole local state.
        provenance: Plain JSON that says where the checkpoint comes from.
        opaque: ``"pickle"`` stores objects that have no safe encoding; ``"error"`` refuses them.
        keep_previous: The number of earlier saves at this path to keep on disk.
        collective: False writes from this process alone, which must hold every tensor whole.
        **values: Further objects by name, such as ``step=3``.

    Raises:
        CheckpointError: On every rank, if any rank could not describe or write its part. What was saved
            at this path before is then intact.
        TypeError: A value is named almost like an argument, or optimizers are given without a model.

    Example:
        ``nnx_checkpoint.save("last.ckpt", model=model, optimizer=optimizer, step=3)``
    """
    _refuse_misspelt(values)
    saved = _gathered(model, _listed(optimizer), {**(objects or {}), **values} if values else objects or {})
    writer.save(
        path,
        tensors={**saved.tensors, **_shards(tensors)},
        objects=saved.objects,
        rank_objects=rank_objects,
        aliases={**saved.aliases, **(aliases or {})},
        state_dict_type=state_dict_type,
        provenance=provenance,
        opaque=opaque,
        keep_previous=keep_previous,
        collective=collective,
    )


def load(
    path: Location,
    tensors: Mapping[str, Tensor | Shard] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    strict: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Fill tensors, a module and optimizers in place; collective over all ranks.

    Each rank reads the bytes of its own parts only.

    Args:
        path: A checkpoint of any known format: a directory, a file or a URL.
        tensors: Tensors, DTensors or shards to fill, by the names that they were saved under.
        model: The module to fill.
        optimizer: The optimizer to fill, or as many as were saved.
        strict: False leaves alone what the checkpoint or the module does not have.
        weights_only: False executes code that whoever wrote the checkpoint may have put there.

    Returns:
        The values and objects that were saved.

    Raises:
        CheckpointError: On every rank: there is no checkpoint, it is damaged, or it is of another model.

    Example:
        ``step = nnx_checkpoint.load("last.ckpt", model=model, optimizer=optimizer)["step"]``
    """
    optimizers = _listed(optimizer)
    group = control_group()
    with together(group, doing=f"opening '{path}'"):
        stored = open_checkpoint(path, weights_only=weights_only)
    if model is not None:
        mine = describe_model(model, _shard_of)
        load_model(model, mine, LazyStateDict(stored), strict=strict, group=group)
    with together(group, doing=f"loading '{path}'"):
        for each, state in zip(optimizers, _states(stored, optimizers), strict=True):
            fill_optimizer(_InPlace(), _owner(model), each, state)
        if tensors:
            stored.fill(_shards(tensors))
        found: dict[str, Any] = dict(stored.objects)
    return dict(found["trainer"]) if "trainer" in found else found


def _refuse_misspelt(values: Mapping[str, Any]) -> None:
    for name in values:
        if near := get_close_matches(name, _OPTIONS, n=1, cutoff=0.8):
            raise TypeError(f"save() has no argument {name!r}; for {near[0]!r} it is too near to be a value.")


def _shards(tensors: Mapping[str, Tensor | Shard] | None) -> dict[str, Shard]:
    return {
        name: value if isinstance(value, Shard) else shard_of(value)
        for name, value in (tensors or {}).items()
    }


def _gathered(model: nn.Module | None, optimizers: Sequence[Optimizer], objects: Mapping[str, Any]) -> Saved:
    if model is None and not optimizers:
        return Saved(objects=objects)  # type: ignore[arg-type] # of the user's own class
    owner = _owner(model)
    described = as_state_dict(describe_model(owner, _shard_of))
    states = [describe_optimizer(owner, each, _shard_of) for each in optimizers]
    return collect(described, states if optimizers else None, objects)


def _owner(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise TypeError("An optimizer's state is stored by the names of parameters: pass `model`, too.")
    return model


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _states(stored: Any, optimizers: Sequence[Optimizer]) -> list[OptimizerState]:
    if not optimizers:
        return []
    states = stored_optimizer_states(stored) or []
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"'{stored.path}' has the state of {len(states)} optimizers; {len(optimizers)} are to be filled.",
            remedy="Pass as many as were saved, in the same order.",
        )
    return states


def _shard_of(tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
    """Where a tensor lies is what it says itself, as a DTensor; any other is whole."""
    return shard_of(tensor)


class _InPlace:
    """Allocates optimizer state as torch's own optimizers do."""

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """See `AllocatesState`."""
        return describe_optimizer(module, optimizer, _shard_of)

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """See `AllocatesState`."""
        alike = shape == tuple(parameter.shape)
        return new_state_tensor(parameter, name, shape=shape, like_parameter=alike, dtype=dtype, group=group)
