"""An open checkpoint seen differently: with the tensors in its objects left on disk, or the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from typing_extensions import override

from nnx_checkpoint.foreign.torch_file import map_tree
from nnx_checkpoint.index import TensorEntry
from nnx_checkpoint.naming import FABRIC_KEYS, StoredName, stored_objects
from nnx_checkpoint.reader import Checkpoint, Wanted

_TRAINING = ("callbacks", "lr_schedulers", "current_model_state", "averaging_state")
"""What Lightning leaves out of a checkpoint with ``save_weights_only=True``, besides the optimizers; the last
two are of its averaging callbacks."""


class View(Checkpoint):
    """Another checkpoint, passed on as it is."""

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
    def world_size(self) -> int:
        return self.inner.world_size

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
    """A checkpoint whose objects hold a `StoredName` in place of every tensor: writers read those later."""

    @cached_property
    def objects(self) -> Any:
        """The common objects."""
        return self.tree(None, lambda name: StoredName(self, name))

    @override
    def rank_objects(self, rank: int) -> Any | None:
        return self.tree(rank, lambda name: StoredName(self, name))


class WeightsOnly(View):
    """The model of a checkpoint and what describes it: no optimizers, schedulers or state of callbacks."""

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The model's tensors, and those in the objects that are left."""
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
