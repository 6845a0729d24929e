"""Save and load a module, optimizers, tensors and values by name, in your own training loop.

Entries have the names that strategies give them, so `nnx.load_from_checkpoint` and every strategy find
the weights. Parameters may be plain tensors or DTensors, as after ``fully_shard``. A checkpoint of any number
of processes loads in any other number. `writer` writes and `reader` reads; this module only gathers the state
to save, and distributes the loaded state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from hashlib import sha256
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.dtypes import as_bytes
from nnx_base.errors import CheckpointError
from nnx_base.ranks import control_group, exchange, rank_and_size, together
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.format.codec import Encoder
from nnx_checkpoint.reading.filling import fill_optimizer
from nnx_checkpoint.reading.formats import open_checkpoint
from nnx_checkpoint.reading.loading import load_model
from nnx_checkpoint.reading.naming import (
    LazyStateDict,
    OptimizerState,
    Saved,
    collect,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.state import (
    ModelState,
    as_state_dict,
    describe_model,
    describe_optimizer,
    new_state_tensor,
)
from nnx_checkpoint.storage import Location
from nnx_checkpoint.unpickling.torch_file import map_tree
from nnx_checkpoint.writing import writer
from nnx_checkpoint.writing.request import SaveRequest


def save(
    path: Location,
    tensors: Mapping[str, Tensor | Shard] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    objects: Mapping[str, Any] | None = None,
    rank_objects: Mapping[str, Any] | None = None,
    prefix: str = "",
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
        objects: All other values of rank 0. An object with `state_dict` is saved as that state.
        rank_objects: A tree of this rank alone, such as its random state or loader, with small tensors.
        prefix: Prefix of the model's names, such as ``"model."`` for a LightningModule's ``self.model``.
        aliases: Tied names that share storage with a tensor stored under another name.
        state_dict_type: ``"deduped"`` stores each box once; ``"sharded"`` every rank's complete local state.
        provenance: Plain JSON about the origin of the checkpoint.
        opaque: ``"pickle"`` stores objects that have no safe encoding; ``"error"`` refuses them.
        keep_previous: The number of earlier saves at this path to keep on disk.
        collective: False writes from this process alone, which must hold every tensor unsharded.
        **values: Further objects by name, such as ``step=3`` or ``scheduler=scheduler``.

    Raises:
        CheckpointError: A rank cannot describe or write its shards, or states differ (on every rank).
        TypeError: A value is named almost like an argument, or optimizers are given without a model.

    Example:
        ``nnx_checkpoint.save("last.ckpt", model=model, optimizer=optimizer, scheduler=scheduler, step=3)``
    """
    _refuse_misspelt("save", values, _SAVE_OPTIONS)
    common, own = _states_of(objects or {}, values, rank_objects, opaque, collective=collective)
    saved = _gathered(model, _listed(optimizer), common, prefix)
    request = SaveRequest(
        path,
        tensors={**saved.tensors, **_shards(tensors)},
        objects=saved.objects,
        rank_objects=own,
        aliases={**saved.aliases, **(aliases or {})},
        state_dict_type=state_dict_type,
        provenance=provenance or {},
        opaque=opaque,
        keep_previous=keep_previous,
        collective=collective,
    )
    writer.save(request)


def load(
    path: Location,
    tensors: Mapping[str, Tensor | Shard] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    objects: Mapping[str, Any] | None = None,
    rank_objects: Mapping[str, Any] | None = None,
    prefix: str = "",
    strict: bool = True,
    weights_only: bool = True,
    **stateful: Any,
) -> dict[str, Any]:
    """Fill tensors, a module, optimizers and other objects in place; collective over all ranks.

    Each rank reads the bytes of its own shards only.

    Args:
        path: A checkpoint of any known format: a directory, a file or a URL.
        tensors: Tensors, DTensors or shards to fill, by the names that they were saved under.
        model: The module to fill.
        optimizer: The optimizer to fill, or as many as were saved.
        objects: Objects with `load_state_dict`, by the names that they were saved under.
        rank_objects: Names of entries saved as `rank_objects`; needs as many processes as saved.
        prefix: Prefix of the model's names, such as ``"model."`` for a LightningModule's ``self.model``.
        strict: False ignores entries that only the checkpoint or only the module has.
        weights_only: False executes code that the author of the checkpoint may have put there.
        **stateful: Further objects with `load_state_dict`, such as ``scheduler=scheduler``.

    Returns:
        The saved values and objects, except those that were filled in place.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model (on every rank).
        TypeError: An object has no `load_state_dict`, or is named almost like an argument.

    Example:
        ``step = nnx_checkpoint.load("last.ckpt", model=model, scheduler=scheduler)["step"]``
    """
    targets = {**(objects or {}), **stateful}
    _refuse_misspelt("load", stateful, _LOAD_OPTIONS)
    for name, target in {**targets, **(rank_objects or {})}.items():
        _refuse_stateless(target, name)
    optimizers, group = _listed(optimizer), control_group()
    with together(group, doing=f"opening '{path}'"):
        stored = open_checkpoint(path, weights_only=weights_only)
    if model is not None:
        _fill_model(model, stored, prefix, strict=strict)
    with together(group, doing=f"loading '{path}'"):
        states = [_renamed(state, _without(prefix)) for state in _states(stored, optimizers)]
        for each, state in zip(optimizers, states, strict=True):
            fill_optimizer(_InPlace(), _owner(model), each, state)
        if tensors:
            stored.fill(_shards(tensors))
        found: dict[str, Any] = dict(stored.objects)
        found = dict(found["trainer"]) if "trainer" in found else found
        _fill_objects(targets, found, strict=strict)
        if rank_objects:
            _fill_objects(rank_objects, _own_tree(stored, *rank_and_size(group)), strict=strict)
    return {name: value for name, value in found.items() if name not in targets}


_SAVE_OPTIONS = signature(save).parameters.keys() - {"path", "tensors", "objects", "values", "model"}
_LOAD_OPTIONS = signature(load).parameters.keys() - {"path", "tensors", "objects", "stateful"}


def _refuse_misspelt(function: str, values: Mapping[str, Any], options: Iterable[str]) -> None:
    for name in values:
        if near := get_close_matches(name, options, n=1, cutoff=0.8):
            raise TypeError(
                f"{function}() has no argument {name!r}; a value's name must differ more from {near[0]!r}."
            )


def _shards(tensors: Mapping[str, Tensor | Shard] | None) -> dict[str, Shard]:
    return {
        name: value if isinstance(value, Shard) else shard_of(value)
        for name, value in (tensors or {}).items()
    }


def _gathered(
    model: nn.Module | None, optimizers: Sequence[Optimizer], objects: Mapping[str, Any], prefix: str
) -> Saved:
    if model is None and not optimizers:
        return Saved(objects=objects)  # type: ignore[arg-type] # of the user's own class
    owner = _owner(model)
    described = as_state_dict(describe_model(owner, _shard_of))
    states = [
        _renamed(describe_optimizer(owner, each, _shard_of), lambda name: prefix + name)
        for each in optimizers
    ]
    named = {prefix + name: value for name, value in described.items()}
    return collect(named, states if optimizers else None, objects)


def _renamed(state: OptimizerState, change: Callable[[str], str]) -> OptimizerState:
    """Return the state with parameter names changed; numbers stay."""

    def name_of(key: Any) -> Any:
        return change(key) if isinstance(key, str) else key

    groups = [{**group, "params": list(map(name_of, group["params"]))} for group in state["param_groups"]]
    return OptimizerState(
        state={name_of(key): values for key, values in state["state"].items()}, param_groups=groups
    )


def _without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


_OTHER_MODEL = (
    "Build the model as it was when it was saved, or pass strict=False to load only names that match."
)


def _fill_model(model: nn.Module, stored: Checkpoint, prefix: str, *, strict: bool) -> None:
    """Fill a module with the entries below a prefix. Collective.

    Raises:
        CheckpointError: Names or shapes differ. The remedy names another prefix if that fits.
    """
    group = control_group()
    source = LazyStateDict(stored, prefix)
    with together(group, doing="describing the model"):
        state = describe_model(model, _shard_of)
        _refuse_other_prefix(state, source, prefix)
    load_model(model, state, source, strict=strict, remedy=_OTHER_MODEL, group=group)


def _refuse_other_prefix(state: ModelState, source: LazyStateDict, prefix: str) -> None:
    names = [*state.tensors, *state.extra]
    if not names or any(name in source for name in (*names, *state.aliases)):
        return
    every = list(LazyStateDict(source.stored))
    fits = {name.removesuffix(names[0]) for name in every if f".{name}".endswith(f".{names[0]}")}
    fitting = [each for each in sorted(fits, key=len) if all(each + name in every for name in names)]
    if fitting:
        raise CheckpointError(
            f"the names in '{source.stored.path}' begin with {fitting[0]!r}"
            + (f", and prefix is {prefix!r}." if prefix else ", the names of the model do not."),
            remedy=f"Pass prefix={fitting[0]!r}." if fitting[0] else "Leave prefix out.",
        )


def _owner(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise TypeError("an optimizer's state is stored by parameter name: pass `model` as well.")
    return model


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _states(stored: Any, optimizers: Sequence[Optimizer]) -> list[OptimizerState]:
    if not optimizers:
        return []
    states = stored_optimizer_states(stored) or []
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"'{stored.path}' has the state of {len(states)} optimizers, and load() got {len(optimizers)}.",
            remedy="Pass all saved optimizers, in the same order.",
        )
    return states


def _is_stateful(value: Any) -> bool:
    """Return True if an object has `state_dict`, like schedulers, GradScalers, samplers and loaders."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def with_states(request: SaveRequest) -> SaveRequest:
    """Return the request with stateful objects replaced by their state. Collective if the request is.

    Raises:
        CheckpointError: A state is sharded, or differs between ranks.
    """
    objects, rank_objects = _states_of(
        request.objects, {}, request.rank_objects, request.opaque, collective=request.collective
    )
    return replace(request, objects=objects, rank_objects=rank_objects)


def _states_of(
    objects: Mapping[str, Any],
    values: Mapping[str, Any],
    rank_objects: Mapping[str, Any] | None,
    opaque: Literal["error", "pickle"],
    *,
    collective: bool,
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return both trees with stateful objects replaced by their state.

    Raises:
        CheckpointError: A state is sharded, or a state in `objects` differs between ranks.
    """
    group = control_group() if collective else None
    found: list[Any] = []

    def read() -> dict[str, str]:
        states: dict[str, Any] = {}
        common = _with_states({**objects, **values} if values else objects, (), states)
        found[:] = common, None if rank_objects is None else _with_states(rank_objects, (), {})
        return {name: _digest(state, opaque) for name, state in states.items()} if group else {}

    exchange(group, read, _refuse_differing_states, doing="reading the state of the objects to save")
    return found[0], found[1]


def _refuse_differing_states(digests: list[dict[str, str]]) -> list[None]:
    first = digests[0]
    for rank, theirs in enumerate(digests):
        for name in first.keys() & theirs.keys():
            if first[name] != theirs[name]:
                raise CheckpointError(
                    f"the state of {name!r} on rank {rank} differs from rank 0, whose state would be "
                    "stored for all.",
                    remedy=f"Pass it as rank_objects={{{name!r}: ...}}, to save and to load.",
                )
    return [None] * len(digests)


def _with_states(value: Any, place: tuple[str, ...], states: dict[str, Any]) -> Any:
    """Return a tree with stateful objects replaced by their state; add each state to `states` by position."""
    if _is_stateful(value):
        state = value.state_dict()
        name = ".".join(place)
        map_tree(state, lambda leaf: _refuse_sharded(leaf, value, name))
        states[name] = state
        return state
    if type(value) is dict or (not place and isinstance(value, Mapping)):
        changed = {key: _with_states(item, (*place, str(key)), states) for key, item in value.items()}
        return changed if any(changed[key] is not value[key] for key in changed) else value
    if type(value) in (list, tuple):
        items = [_with_states(item, (*place, str(index)), states) for index, item in enumerate(value)]
        return type(value)(items)
    return value


def _refuse_sharded(leaf: Any, owner: Any, name: str) -> Any:
    if isinstance(leaf, DTensor):
        raise CheckpointError(
            f"the state of {name!r}, a {type(owner).__name__}, holds DTensors, which are sharded.",
            remedy="Save it as `model` or `optimizer`; use one checkpoint for each if there are several.",
        )
    return leaf


def _digest(state: Any, opaque: Literal["error", "pickle"]) -> str:
    """Return a hash of a state, which ranks compare."""
    encoder = Encoder("", "skip" if opaque == "pickle" else "error")
    found = sha256(json.dumps(encoder.encode(state), sort_keys=True).encode())
    for _, tensor in sorted(encoder.tensors.items()):
        if isinstance(tensor, Tensor):
            found.update(as_bytes(tensor.cpu()).numpy().tobytes())
    return found.hexdigest()


def _refuse_stateless(target: Any, name: str) -> None:
    """Refuse a target without `load_state_dict`."""
    if type(target) is dict:
        for key, item in target.items():
            _refuse_stateless(item, f"{name}.{key}")
    elif type(target) in (list, tuple):
        for index, item in enumerate(target):
            _refuse_stateless(item, f"{name}.{index}")
    elif not _is_stateful(target):
        raise TypeError(
            f"load() cannot fill {name!r}, a {type(target).__name__}: it has no `load_state_dict`. "
            "Values are returned: load(...)[name]."
        )


def _fill_objects(targets: Mapping[str, Any], found: Mapping[str, Any], *, strict: bool) -> None:
    """Load every object from the state saved under its name.

    Raises:
        CheckpointError: The name is missing in the checkpoint, or has another number of objects.
    """
    for name, target in targets.items():
        if name in found:
            _fill_object(target, found[name], name)
        elif strict:
            near = get_close_matches(name, map(str, found), n=1)
            raise CheckpointError(
                f"the checkpoint has no {name!r}; it has {', '.join(map(repr, found)) or 'no objects'}.",
                remedy=(f"Did you mean {near[0]!r}? " if near else "")
                + "Load the object under the name that it was saved under, or pass strict=False.",
            )


def _fill_object(target: Any, state: Any, name: str) -> None:
    if type(target) not in (dict, list, tuple):
        target.load_state_dict(state)
        return
    pairs = target if isinstance(target, dict) else dict(enumerate(target))
    saved = dict(enumerate(state)) if isinstance(state, (list, tuple)) else state
    if not isinstance(saved, dict) or pairs.keys() != saved.keys():
        raise CheckpointError(
            f"{name!r} has {len(pairs)} objects to fill, and the checkpoint has "
            f"{len(saved) if isinstance(saved, dict) else 'one'} under this name.",
            remedy="Pass the same objects as in save(), in the same order.",
        )
    for key, item in pairs.items():
        _fill_object(item, saved[key], f"{name}.{key}")


def _own_tree(stored: Checkpoint, rank: int, size: int) -> Mapping[str, Any]:
    """Return the objects that this rank saved."""
    if stored.world_size != size:
        raise CheckpointError(
            f"'{stored.path}' has rank_objects of {stored.world_size} processes, and {size} load it.",
            remedy="Load with as many processes, or without rank_objects.",
        )
    found = stored.rank_objects(rank)
    return found if isinstance(found, Mapping) else {}


def _shard_of(tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
    """Return the shard of a tensor: a DTensor's local shard; any other tensor is unsharded."""
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
