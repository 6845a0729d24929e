"""The logical names of a checkpoint: between a training state and what `nnx.checkpoint` stores.

Every strategy writes the same names, so every strategy reads every other's checkpoint::

    model.<parameter or buffer>                        tensors
    optim.<i>.state.<parameter>.<state name>           tensors
    objects: {"trainer": ..., "optim": [{"groups", "values"}], "extra": {...}}

This module knows neither files nor Lightning. It moves `Shard` handles between those names and the
live module and optimizers, in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.backend import Backend
from nnx.errors import CheckpointError
from nnx.layout import Box, Shard, shard_of
from nnx.state import ModelState, OptimizerState, parameter_names

__all__ = [
    "LazyStateDict",
    "Saved",
    "StoredTensors",
    "collect",
    "fill_model",
    "fill_optimizer",
    "positional_optimizer_state",
    "stored_optimizer_states",
]


class StoredEntry(Protocol):
    """Shape and dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class StoredTensors(Protocol):
    """What this module needs of an open checkpoint; `nnx.checkpoint.Checkpoint` is one."""

    @property
    def tensors(self) -> Mapping[str, StoredEntry]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def objects(self) -> Any: ...
    def fill(self, shards: Mapping[str, Shard]) -> None: ...
    def read(self, name: str, box: Box | None = None) -> Tensor: ...


@dataclass(slots=True)
class Saved:
    """What is handed to `nnx.checkpoint.save`."""

    tensors: dict[str, Shard] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


# --- out of a training state ----------------------------------------------------------------------


def collect(
    model: Mapping[str, Any] | None,
    optimizers: Sequence[OptimizerState] | None,
    rest: Mapping[str, Any],
) -> Saved:
    """Give every tensor its logical name and leave the rest as objects.

    Args:
        model: Names to shards, tensors or extra state, as a ``state_dict``; None saves no model.
        optimizers: One state for each optimizer; None saves none.
        rest: Everything else, stored under ``"trainer"``.
    """
    saved = Saved(objects={"trainer": dict(rest)})
    if model is not None:
        saved.objects["extra"] = _collect_model(model, saved)
    if optimizers is not None:
        saved.objects["optim"] = [
            _collect_optimizer(f"optim.{index}", state, saved) for index, state in enumerate(optimizers)
        ]
    return saved


def _collect_model(model: Mapping[str, Any], saved: Saved) -> dict[str, Any]:
    stored: dict[int, str] = {}
    extra = {}
    for name, value in model.items():
        key = f"model.{name}"
        if not isinstance(value, (Shard, Tensor)):
            extra[name] = value
        elif id(value) in stored:
            saved.aliases[key] = stored[id(value)]
        else:
            stored[id(value)] = key
            saved.tensors[key] = _as_shard(value)
    return extra


def _collect_optimizer(prefix: str, state: OptimizerState, saved: Saved) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, (Shard, Tensor)):
                saved.tensors[f"{prefix}.state.{parameter}.{name}"] = _as_shard(value)
            else:
                values.setdefault(parameter, {})[name] = value
    return {"groups": state["param_groups"], "values": values}


def _as_shard(value: Shard | Tensor) -> Shard:
    return value if isinstance(value, Shard) else shard_of(value)


def positional_optimizer_state(state: Mapping[str, Any], names: Sequence[str]) -> OptimizerState:
    """Give torch's own ``Optimizer.state_dict()``, which numbers parameters, their names.

    Args:
        state: As torch returns it.
        names: Name of parameter 0, 1, ... in the order of the param groups.
    """
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[i] for i in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return OptimizerState(state={names[i]: dict(v) for i, v in state["state"].items()}, param_groups=groups)


# --- into a training state ------------------------------------------------------------------------


class LazyStateDict(MutableMapping[str, Any]):
    """A ``state_dict`` whose tensors stay in the checkpoint until somebody looks at them.

    Hooks such as ``on_load_checkpoint`` see complete tensors and may rename, replace or delete entries;
    what they never touch is later read in parts, straight into this rank's shards.

    Args:
        stored: The open checkpoint.
        prefix: Only entries whose name begins with it, and without it.
    """

    def __init__(self, stored: StoredTensors, prefix: str = "") -> None:
        self.stored = stored
        logical = f"model.{prefix}"
        names = {**{key: key for key in stored.tensors}, **stored.aliases}
        self._names = {
            name.removeprefix(logical): key for name, key in names.items() if name.startswith(logical)
        }
        extra = stored.objects.get("extra", {})
        self._values: dict[str, Any] = {
            name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)
        }

    def untouched(self, name: str) -> str | None:
        """The logical name to read `name` from, or None if a value was put in its place."""
        return self._names.get(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of an entry, without reading it; None where it is not a tensor."""
        if name in self._names:
            return self.stored.tensors[self._names[name]].shape
        value = self._values[name]
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            self._values[name] = self.stored.read(self._names.pop(name))
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names.pop(name, None)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if self._names.pop(name, None) is None:
            del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._values))

    def __len__(self) -> int:
        return len(self._names) + len(self._values)


def fill_model(module: nn.Module, state: ModelState, source: Mapping[str, Any], *, strict: bool) -> None:
    """Fill a module's shards in place from a state dict, lazy or complete.

    Args:
        module: Where extra state is set.
        state: This rank's handles, from `Backend.model_state`.
        source: A `LazyStateDict` or a mapping of complete tensors.
        strict: Refuse missing and unexpected names; shapes must match either way.

    Raises:
        CheckpointError: With every missing and unexpected name and every shape that differs.
    """
    targets = dict(state.tensors)
    _check_names(state, source, strict=strict)
    lazy: dict[str, Shard] = {}
    for name, shard in targets.items():
        found = _first_present(name, state, source)
        if found is None:
            continue
        key = source.untouched(found) if isinstance(source, LazyStateDict) else None
        if key is None:
            shard.fill_from(source[found])
        else:
            lazy[key] = shard
    if isinstance(source, LazyStateDict):
        _fill_casting(source.stored, lazy)
    for name in state.extra:
        if name in source:
            prefix = name.removesuffix("_extra_state").removesuffix(".")
            module.get_submodule(prefix).set_extra_state(source[name])


def _first_present(name: str, state: ModelState, source: Mapping[str, Any]) -> str | None:
    """Under which of its names a (possibly tied) tensor is found."""
    names = (name, *(alias for alias, stored in state.aliases.items() if stored == name))
    return next((candidate for candidate in names if candidate in source), None)


def _check_names(state: ModelState, source: Mapping[str, Any], *, strict: bool) -> None:
    missing = [name for name in state.tensors if _first_present(name, state, source) is None]
    missing += [name for name in state.extra if name not in source]
    known = {*state.tensors, *state.aliases, *state.extra}
    unexpected = [name for name in source if name not in known]
    shapes = []
    for name, shard in state.tensors.items():
        found = _first_present(name, state, source)
        if found is None:
            continue
        stored = source.shape(found) if isinstance(source, LazyStateDict) else tuple(source[found].shape)
        if stored != shard.shape:
            shapes.append(f"{name} is {stored} in the checkpoint and {shard.shape} in the model")
    if shapes or (strict and (missing or unexpected)):
        raise _another_model(missing, unexpected, shapes)


def _another_model(missing: list[str], unexpected: list[str], shapes: list[str]) -> CheckpointError:
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
        remedy="Build the model as it was when it was saved, rename keys in `on_load_checkpoint`, or set "
        "`strict_loading=False` on the LightningModule to load only the names that match.",
    )


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _fill_casting(stored: StoredTensors, shards: Mapping[str, Shard]) -> None:
    """Fill in place; tensors stored in another floating dtype are read and converted."""
    exact: dict[str, Shard] = {}
    cast: dict[str, Shard] = {}
    for key, shard in shards.items():
        same = stored.tensors[key].dtype == shard.dtype
        (exact if same else cast)[key] = shard
    stored.fill(exact)
    for key, shard in cast.items():
        dtype = stored.tensors[key].dtype
        if not (dtype.is_floating_point and shard.dtype.is_floating_point):
            raise CheckpointError(
                f"{key} is {dtype} in the checkpoint and {shard.dtype} in the model.",
                remedy="Convert it in `on_load_checkpoint`, or build the model with the saved dtype.",
            )
        for box, view in zip(shard.boxes, shard.data, strict=True):
            view.copy_(stored.read(key, box))


def stored_optimizer_states(stored: StoredTensors) -> list[OptimizerState] | None:
    """The optimizers of a checkpoint, their tensors as logical names (`StoredName`); None if none saved."""
    described = stored.objects.get("optim")
    if described is None:
        return None
    states = [
        OptimizerState(
            state={parameter: dict(values) for parameter, values in entry["values"].items()},
            param_groups=[dict(group) for group in entry["groups"]],
        )
        for entry in described
    ]
    for key in stored.tensors:
        if not key.startswith("optim."):
            continue
        index, _, rest = key.removeprefix("optim.").partition(".state.")
        parameter, _, name = rest.rpartition(".")
        states[int(index)]["state"].setdefault(parameter, {})[name] = StoredName(stored, key)
    return states


@dataclass(frozen=True, slots=True)
class StoredName:
    """A tensor that is still in the checkpoint."""

    stored: StoredTensors
    key: str


def fill_optimizer(
    backend: Backend[Any], module: nn.Module, optimizer: Optimizer, saved: OptimizerState
) -> None:
    """Restore an optimizer in place, by parameter name, allocating what it does not have yet.

    Args:
        backend: Allocates and describes state tensors.
        module: Owner of the parameters.
        optimizer: To be restored.
        saved: Its state: values are `StoredName`, complete tensors, or other values.

    Raises:
        CheckpointError: The param groups differ from the saved ones.
    """
    names = parameter_names(module)
    _restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in saved["state"].get(names[parameter], {}).items():
                optimizer.state[parameter][name] = _place(backend, parameter, name, value, group)
    _fill_state_tensors(backend.optimizer_state(module, optimizer), saved)


def _place(
    backend: Backend[Any], parameter: nn.Parameter, name: str, value: Any, group: Mapping[str, Any]
) -> Any:
    if isinstance(value, StoredName):
        entry = value.stored.tensors[value.key]
        shape, dtype = tuple(entry.shape), entry.dtype
    elif isinstance(value, Tensor):
        shape, dtype = tuple(value.shape), value.dtype
    else:
        return value
    return backend.new_optimizer_state(parameter, name, shape=shape, dtype=dtype, group=group)


def _fill_state_tensors(state: OptimizerState, saved: OptimizerState) -> None:
    lazy: dict[str, Shard] = {}
    source: StoredTensors | None = None
    for parameter, entries in state["state"].items():
        for name, shard in entries.items():
            value = saved["state"][parameter][name]
            if isinstance(value, StoredName):
                lazy[value.key] = shard
                source = value.stored
            elif isinstance(value, Tensor):
                shard.fill_from(value)
    if source is not None:
        source.fill(lazy)


def _restore_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Sequence[Mapping[str, Any]]
) -> None:
    current = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if len(current) != len(saved):
        raise CheckpointError(
            f"{type(optimizer).__name__} has {len(current)} param groups and the checkpoint has {len(saved)}.",
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
