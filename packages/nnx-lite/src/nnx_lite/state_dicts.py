"""Provide state dicts that describe their shards, so that no shard passes for the full tensor.

Under nnx's strategies ``model.state_dict()`` holds this rank's shards. `ModuleState` keeps their description,
and `OptimizerStateDict` keeps the module of its names. `nnx_lite.checkpoint` saves them. This module copies
them back in memory, without communication.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nnx_base.shard import Shard, shard_of
from nnx_core.errors import CheckpointError

__all__ = ["ModuleState", "OptimizerStateDict", "fill_module", "fill_optimizer", "holds_shards"]

_REMEDY = "Use `model.state_dict()` or a `copy.deepcopy` of it, and change values in place only."


class ModuleState(OrderedDict[str, Any]):
    """A module's ``state_dict`` with this rank's shards as values.

    Args:
        values: The values by name, as torch returns them.
        shards: The same values by name, as the engine describes them.
        owner: The module; None in a copy whose module was deleted.
    """

    def __init__(
        self, values: Any = (), shards: Mapping[str, Any] | None = None, owner: nn.Module | None = None
    ) -> None:
        super().__init__(values)
        self.owner = weakref.ref(owner) if owner is not None else None
        self._live = {name: value for name, value in self.items() if isinstance(value, Tensor)}
        self._shards = dict(shards or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        made = ModuleState(  # torch's own copy of a DTensor fails
            (name, value.detach().clone() if isinstance(value, Tensor) else deepcopy(value, memo))
            for name, value in self.items()
        )
        made.owner, made._shards, made._live = self.owner, self._shards, {}
        return made

    def described(self) -> dict[str, Any]:
        """Return the shard of every tensor by name, and other values unchanged.

        Raises:
            CheckpointError: A new value is neither the full tensor nor this rank's shard.
        """
        return {name: self._described(name, value) for name, value in self.items()}

    def _described(self, name: str, value: Any) -> Any:
        known = self._shards.get(name)
        if not isinstance(value, Tensor) or not isinstance(known, Shard):
            return value
        if self._live.get(name) is value:
            return known
        if isinstance(value, DTensor) or tuple(value.shape) == known.shape:
            return shard_of(value)
        if len(known.boxes) == 1 and known.boxes[0].size == tuple(value.shape):
            return Shard(known.shape, value.dtype, known.boxes, (value.detach(),))
        raise CheckpointError(
            f"{name} is {tuple(value.shape)} in the state dict and {known.shape} in the model.",
            remedy=_REMEDY,
        )


class OptimizerStateDict(dict[str, Any]):
    """An optimizer's state by parameter name, with the module of these names.

    Args:
        values: The values, as in `nnx_checkpoint.reading.state.OptimizerState`.
        owner: The module.
    """

    def __init__(self, values: Any = (), owner: nn.Module | None = None) -> None:
        super().__init__(values)
        self.owner = weakref.ref(owner) if owner is not None else None


def holds_shards(value: Any) -> bool:
    """Return True if a value is or holds a shard of this rank."""
    if isinstance(value, (ModuleState, OptimizerStateDict, Shard, DTensor)):
        return True
    if isinstance(value, Mapping):
        return any(holds_shards(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(holds_shards(item) for item in value)


def as_shard(value: Any) -> Any:
    """Return a tensor as a shard, and any other value unchanged."""
    return shard_of(value) if isinstance(value, Tensor) else value


def fill_module(mine: Mapping[str, Any], source: Mapping[str, Any], *, strict: bool) -> None:
    """Copy a state dict in memory into a module's shards.

    Args:
        mine: The module's own shards by name, including tied names.
        source: Shards of the same layout, or full tensors, by name.
        strict: True to refuse missing and unexpected names.

    Raises:
        CheckpointError: Names or shapes differ, or the shards have another layout.
    """
    missing = [name for name in mine if name not in source]
    unexpected = [name for name in source if name not in mine]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the state dict is of another model; missing: {missing[:8]}, unexpected: {unexpected[:8]}.",
            remedy="Build the model as it was saved, or pass `strict=False`.",
        )
    for name, shard in mine.items():
        if isinstance(shard, Shard) and name in source:
            _copy(name, as_shard(source[name]), shard)


def fill_optimizer(mine: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Copy an optimizer's state in memory into its existing tensors.

    Args:
        mine: The optimizer's own state by parameter name.
        source: An earlier state of the same optimizer.

    Raises:
        CheckpointError: The optimizer has no state yet, or the layout differs.
    """
    for parameter, entries in source["state"].items():
        own = mine["state"].get(parameter, {})
        for name, value in entries.items():
            if not isinstance(value, (Shard, Tensor)):
                continue
            if name not in own:
                raise CheckpointError(
                    f"the optimizer has no {name} of {parameter} yet to copy into.",
                    remedy="Save it with `self.save` and load it with `self.load`, which allocates state.",
                )
            _copy(f"{parameter}.{name}", as_shard(value), own[name])


def _copy(name: str, source: Any, target: Shard) -> None:
    if source.shape != target.shape:
        raise CheckpointError(
            f"{name} is {source.shape} in the state dict and {target.shape} in the model.",
            remedy=_REMEDY,
        )
    if source.boxes == target.boxes:
        for theirs, view in zip(source.data, target.data, strict=True):
            view.copy_(theirs)
    elif source.is_whole:
        target.fill_from(source.data[0])
    else:
        raise CheckpointError(
            f"{name} is sharded in another way in the state dict than in the model.",
            remedy="Save it with `self.save` and load it with `self.load`, which reads any layout.",
        )
