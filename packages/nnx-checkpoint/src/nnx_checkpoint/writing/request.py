"""The request of one save: its tensors, its objects, and the way to write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.storage import Location
from nnx_checkpoint.writing.plan import Mode


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The request of this rank for one save.

    Attributes:
        path: Directory of the checkpoint: new, empty, or a checkpoint to replace. A path, or a URL such
            as ``s3://bucket/last.ckpt``.
        tensors: This rank's shards of every logical tensor.
        objects: All other state, stored from rank zero. Tensors in the tree are stored as tensors: a plain
            tensor with rank zero's value, a DTensor or shard from all ranks. So all ranks pass the same tree.
        rank_objects: A tree of this rank alone, such as its random state; it may hold small tensors.
        aliases: Tied names that share storage with a tensor stored under another name.
        state_dict_type: ``"deduped"`` stores each box once across the world; ``"sharded"`` stores the
            complete local state of every rank, so that each rank resumes from its own file.
        provenance: Plain JSON about the origin of the checkpoint. Nothing depends on it.
        opaque: ``"pickle"`` stores objects that have no safe encoding; ``"error"`` refuses them.
        keep_previous: The number of earlier saves at this path to keep on disk.
        collective: False writes from this process alone, which must hold complete tensors; for
            strategies that save from one rank.

    Raises:
        CheckpointError: `state_dict_type` is unknown.
    """

    path: Location
    tensors: Mapping[str, Shard]
    objects: Mapping[str, Any]
    rank_objects: Mapping[str, Any] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    state_dict_type: Mode = "deduped"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    opaque: Literal["error", "pickle"] = "error"
    keep_previous: int = 0
    collective: bool = True

    def __post_init__(self) -> None:
        if self.state_dict_type not in ("sharded", "deduped"):
            raise CheckpointError(
                f"unknown state_dict_type {self.state_dict_type!r}.", remedy='Use "sharded" or "deduped".'
            )
