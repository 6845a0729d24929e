"""Translate between a training state and the logical names of a checkpoint.

Every strategy writes the same names, so every strategy reads every other's checkpoint::

    model.<parameter or buffer>                        tensors
    optim.<i>.state.<parameter>.<state name>           tensors
    objects: {"trainer": ..., "optim": [{"groups", "values"}], "extra": {...}}

This module owns the names, and the lazy views on an open checkpoint. It knows neither files nor Lightning.
`nnx_checkpoint.reading.state` fills live modules and optimizers from them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.format.index import TensorEntry
from nnx_checkpoint.reading.fetching import Wanted
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.unpickling.torch_file import map_tree

RANKS = "nnx_ranks"
"""Key of Lightning's dict for the ranks' own objects: a sequence with one tree for each rank."""
FABRIC_KEYS = "nnx-fabric-keys"
"""Key for the user's names of modules and optimizers, in a checkpoint that Fabric saved."""


class OptimizerState(TypedDict):
    """State of one optimizer, in the shape of ``Optimizer.state_dict()`` but keyed by parameter name.

    It fits any torch optimizer and any number of param groups.
    """

    state: dict[str, dict[str, Any]]
    """By parameter name, then by state name: a `Shard` for every tensor, other values unchanged."""
    param_groups: list[dict[str, Any]]
    """Hyper-parameters of each group; ``"params"`` holds parameter names in order."""


@dataclass(slots=True)
class Saved:
    """The arguments of `nnx_checkpoint.writing.writer.save`."""

    tensors: dict[str, Shard] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    rank_objects: dict[str, Any] | None = None


def collect(
    model: Mapping[str, Any] | None,
    optimizers: Sequence[OptimizerState] | None,
    rest: Mapping[str, Any],
) -> Saved:
    """Collect tensors under their logical names, and the rest as objects.

    Args:
        model: Names to shards, tensors or extra state, as a ``state_dict``; None saves no model.
        optimizers: One state for each optimizer; None saves none.
        rest: All other entries, stored under ``"trainer"``.
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
    stored: dict[Any, str] = {}
    extra = {}
    for name, value in model.items():
        key = f"model.{name}"
        if not isinstance(value, (Shard, Tensor)):
            extra[name] = value
            continue
        identity = _identity(value)
        if identity in stored:
            saved.aliases[key] = stored[identity]
        else:
            stored[identity] = key
            saved.tensors[key] = _as_shard(value)
    return extra


def _identity(value: Shard | Tensor) -> Any:
    """Return the key that tied entries share, as `Module.state_dict` makes a tensor object for each name."""
    if isinstance(value, (Shard, DTensor)) or value.numel() == 0 or value.is_meta or not value.data_ptr():
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device


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
    """Replace the parameter numbers of torch's own ``Optimizer.state_dict()`` by names.

    Args:
        state: The state as torch returns it.
        names: Name of parameter 0, 1, ... in the order of the param groups.
    """
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[i] for i in group["params"]],
        }
        for group in state["param_groups"]
    ]
    by_name = {names[i] if isinstance(i, int) else i: dict(v) for i, v in state["state"].items()}
    return OptimizerState(state=by_name, param_groups=groups)


def numbered_optimizer_state(state: OptimizerState, *, keep_names: bool = False) -> dict[str, Any]:
    """Number a state by parameter name, in the form of torch's ``Optimizer.state_dict()``.

    Args:
        state: Tensors and values by parameter name.
        keep_names: Keep the names in each group's ``param_names``, which `nnx.CheckpointIO` reads.
    """
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        kept = {"param_names": list(group["params"])} if keep_names else {}
        groups.append({**group, "params": [numbers[name] for name in group["params"]], **kept})
    return {
        # State that belongs to no parameter keeps its key, as in torch's own.
        "state": {numbers.get(name, name): values for name, values in state["state"].items()},
        "param_groups": groups,
    }


class LazyStateDict(MutableMapping[str, Any]):
    """A ``state_dict`` whose tensors stay in the checkpoint until their first access.

    Hooks such as ``on_load_checkpoint`` see unsharded tensors and may rename, replace or delete entries.
    Each rank later reads the slices of untouched entries straight into its shards.

    Args:
        stored: The open checkpoint.
        prefix: The prefix of the entries to show; their keys omit it.
    """

    def __init__(self, stored: Checkpoint, prefix: str = "") -> None:
        self.stored = stored
        logical = f"model.{prefix}"
        self._names = {
            name.removeprefix(logical): name
            for name in (*stored.tensors, *stored.aliases)
            if name.startswith(logical)
        }
        extra = stored_objects(stored, "extra")
        self._values: dict[str, Any] = {
            name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)
        }

    @classmethod
    def of(cls, stored: Checkpoint, entries: Mapping[str, Any]) -> LazyStateDict:
        """Return the lazy form of a ``state_dict`` among the objects of a checkpoint.

        Args:
            stored: The open checkpoint.
            entries: The entries by name: a `StoredName` for each stored tensor, and other values.
        """
        made = cls.__new__(cls)
        made.stored = stored
        made._names = {name: value.key for name, value in entries.items() if isinstance(value, StoredName)}
        made._values = {name: value for name, value in entries.items() if name not in made._names}
        return made

    def prefixed(self, prefix: str) -> LazyStateDict:
        """Return the same entries with a prefix before each name."""
        made = copy(self)
        made._names = {prefix + name: key for name, key in self._names.items()}
        made._values = {prefix + name: value for name, value in self._values.items()}
        return made

    def __copy__(self) -> LazyStateDict:
        made = type(self).__new__(type(self))
        made.stored, made._names, made._values = self.stored, dict(self._names), dict(self._values)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyStateDict:
        made = copy(self)
        made._values = deepcopy(self._values, memo)
        return made

    def untouched(self, name: str) -> str | None:
        """Return the logical name to read `name` from, or None if a value was put in its place."""
        return self._names.get(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of an entry without reading it; None if it is not a tensor."""
        if name in self._names:
            return tuple(self.stored.entry(self._names[name]).shape)
        value = self._values[name]
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._values  # the inherited method reads the tensor

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

    def __ior__(self, other: Mapping[str, Any]) -> LazyStateDict:
        self.update(other)
        return self

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._values))

    def __len__(self) -> int:
        return len(self._names) + len(self._values)


@dataclass(frozen=True, slots=True)
class StoredName:
    """A tensor that is still in the checkpoint.

    Attributes:
        stored: The open checkpoint.
        key: Its logical name in the checkpoint.
    """

    stored: Checkpoint
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its logical shape."""
        return tuple(self.stored.tensors[self.key].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is stored in."""
        return self.stored.tensors[self.key].dtype

    def read(self, box: Box | None = None) -> Tensor:
        """Read the tensor, or a part of it, into CPU memory."""
        return self.stored.read(self.key, box)

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """For optimizer state, the dtype its parameter is stored in; None if it is not stored."""
        parameter, _, _ = self.key.partition(".state.")[2].rpartition(".")
        name = f"model.{parameter}"
        known = name in self.stored.tensors or name in self.stored.aliases
        return self.stored.entry(name).dtype if known else None


class StoredRanks(Sequence[Any]):
    """The objects of each rank, read lazily; empty if the ranks saved none.

    Args:
        stored: The open checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return 0 if self.stored.rank_objects(0) is None else self.stored.world_size

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return self.stored.rank_objects(rank)


def stored_objects(stored: Checkpoint, name: Literal["trainer", "extra"]) -> dict[str, Any]:
    """Return the common object under one of the names above; an empty dict if there is no such name.

    Args:
        stored: The open checkpoint.
        name: The name.

    Raises:
        CheckpointError: The object is no dict: the user saved another value under this name.
    """
    objects = stored.objects
    found = objects.get(name, {}) if isinstance(objects, dict) else objects
    if isinstance(found, dict) and _are_keys(found.get(FABRIC_KEYS)):
        return found
    raise CheckpointError(
        f"{name!r} in the objects of '{stored.path}' was not saved by nnx for a model or a Trainer.",
        remedy="Inspect it with `nnx_checkpoint.open_checkpoint`, or use another checkpoint.",
    )


def _are_keys(keys: Any) -> bool:
    """Return True if this is the record of user keys of a Fabric checkpoint, or None."""
    if keys is None:
        return True
    if not isinstance(keys, dict) or not isinstance(keys.get("prefixes", {}), dict):
        return False
    lists = (keys.get("modules"), keys.get("optimizers"), [*keys.get("prefixes", {}).values()])
    return all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)


def stored_optimizer_states(stored: Checkpoint) -> list[OptimizerState] | None:
    """Return the optimizers of a checkpoint, their tensors as `StoredName`; None if none were saved.

    The state numbers parameters if the program that wrote the checkpoint did, as torch's own does.
    """
    described = stored.objects.get("optim") if isinstance(stored.objects, dict) else None
    if described is None:
        return None
    try:
        return _optimizer_states(stored, described)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the optimizer state in '{stored.path}' is malformed: {type(error).__name__}: {error}.",
            remedy="It was not written by a working nnx; resume from another checkpoint.",
        ) from error


def _optimizer_states(stored: Checkpoint, described: Any) -> list[OptimizerState]:
    states = [
        OptimizerState(
            state={parameter: dict(values) for parameter, values in entry["values"].items()},
            param_groups=[dict(group) for group in entry["groups"]],
        )
        for entry in described
    ]
    numbered = [numbers_parameters(state) for state in states]
    for key in stored.tensors:
        if not key.startswith("optim."):
            continue
        index, _, rest = key.removeprefix("optim.").partition(".state.")
        parameter, _, name = rest.rpartition(".")
        owner: Any = int(parameter) if numbered[int(index)] and parameter.isdecimal() else parameter
        states[int(index)]["state"].setdefault(owner, {})[name] = StoredName(stored, key)
    return states


def numbers_parameters(state: Mapping[str, Any]) -> bool:
    """Return True if an optimizer's state has parameter numbers instead of names."""
    return any(isinstance(number, int) for group in state["param_groups"] for number in group["params"])


# Views of an open checkpoint: with the tensors in its objects left on disk, or with the weights alone.


_TRAINING = ("callbacks", "lr_schedulers", "current_model_state", "averaging_state")
"""The entries, besides optimizers, that Lightning omits with ``save_weights_only=True``; the last two belong
to its averaging callbacks."""


class View(Checkpoint):
    """A view that passes another checkpoint on unchanged."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.path = inner.path
        self.format = inner.format

    @property
    @override
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self.inner.tensors

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self.inner.aliases

    @property
    @override
    def omits_prefix(self) -> bool:
        return self.inner.omits_prefix

    @property
    @override
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    @override
    def own_ranks(self) -> Sequence[int]:
        return self.inner.own_ranks

    @property
    @override
    def provenance(self) -> Mapping[str, Any]:
        return self.inner.provenance

    @override
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        return self.inner.tree(rank, tensor)

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        self.inner._fetch(wanted)


class Described(View):
    """A view whose objects hold a `StoredName` for every tensor, which writers read later."""

    @cached_property
    def objects(self) -> Any:
        """The common objects."""
        return self.tree(None, lambda name: StoredName(self, name))

    @override
    def rank_objects(self, rank: int) -> Any | None:
        return self.tree(rank, lambda name: StoredName(self, name))


class Renamed(View):
    """A view with some tensors under other names; objects keep the names of the checkpoint.

    Args:
        inner: The checkpoint.
        names: The name in the checkpoint, which may be an alias, by the name in this view.
        aliases: The aliases of this view.
        hidden: Further tensors of the checkpoint to leave out.
    """

    def __init__(
        self, inner: Checkpoint, names: Mapping[str, str], aliases: Mapping[str, str], hidden: Container[str]
    ) -> None:
        super().__init__(inner)
        self._origins = {name: inner.entry(original) for name, original in names.items()}
        moved = {entry.name for entry in self._origins.values()}
        self._tensors = {name: replace(entry, name=name) for name, entry in self._origins.items()}
        for name, entry in inner.tensors.items():
            if name not in moved and name not in hidden:
                self._tensors[name] = self._origins[name] = entry
        self._aliases = aliases

    @property
    @override
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._tensors

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        self.inner._fetch([replace(each, entry=self._origins[each.entry.name]) for each in wanted])


class WeightsOnly(View):
    """A view of the model and its description: no optimizers, schedulers or state of callbacks."""

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The tensors of the model and of the remaining objects."""
        kept: set[str] = set()
        self.tree(None, kept.add)
        return {
            name: entry
            for name, entry in self.inner.tensors.items()
            if name.startswith("model.") or name in kept
        }

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return {alias: name for alias, name in self.inner.aliases.items() if alias.startswith("model.")}

    @override
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        if rank is not None:
            return None
        described = Described(self.inner)
        trainer = stored_objects(described, "trainer")
        trainer = {key: value for key, value in trainer.items() if key not in _TRAINING}
        if FABRIC_KEYS in trainer:
            trainer[FABRIC_KEYS] = {**trainer[FABRIC_KEYS], "optimizers": []}
        kept = {"trainer": trainer, "extra": stored_objects(described, "extra")}
        return map_tree(kept, lambda value: tensor(value.key) if isinstance(value, StoredName) else value)
