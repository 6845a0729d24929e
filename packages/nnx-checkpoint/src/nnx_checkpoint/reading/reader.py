"""Define `Checkpoint`, the interface of open checkpoints of all formats, which reads only requested bytes.

Resuming, converting and inspecting see `Checkpoint` only. So every format that can be opened can also be
resumed from, merged and converted. `nnx_checkpoint.foreign` opens formats of other programs;
`nnx_checkpoint.reading.formats` finds the format of a path. Nothing here communicates, and no pickle is
executed unless the caller allows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.format.index import TensorEntry
from nnx_checkpoint.reading.fetching import Wanted

__all__ = [
    "Checkpoint",
]


class Checkpoint(ABC):
    """An open checkpoint, under the logical names of `nnx_checkpoint.reading.naming`.

    Attributes:
        path: The opened path.
        format: Name of its format, as in ``nnx ckpt convert --to``.
    """

    path: Any
    format: str

    def __repr__(self) -> str:
        ranks = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"<{self.format} checkpoint {str(self.path)!r}: {len(self.tensors)} tensors, saved by {ranks}>"

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every logical tensor by name, including tensors inside objects."""

    @property
    @abstractmethod
    def aliases(self) -> Mapping[str, str]:
        """Tied names, each mapped to its stored name."""

    @cached_property
    def objects(self) -> Any:
        """All other state: ``{"trainer": ..., "optim": ..., "extra": ...}``, with its tensors."""
        return self._with_tensors(None)

    @property
    def omits_prefix(self) -> bool:
        """True if the names may lack the prefix under which a module holds the model."""
        return False

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""

    @property
    @abstractmethod
    def own_ranks(self) -> Sequence[int]:
        """The ranks that saved objects for themselves, in order. They are found, not claimed."""

    @property
    @abstractmethod
    def provenance(self) -> Mapping[str, Any]:
        """Plain JSON about the origin of the checkpoint."""

    def rank_objects(self, rank: int) -> Any | None:
        """Return the tree that one rank saved for itself; None if it saved none."""
        return self._with_tensors(rank)

    def _with_tensors(self, rank: int | None) -> Any:
        """Return a tree with its tensors (read together: one file may hold thousands)."""
        tensors: dict[str, Wanted] = {}

        def allocated(name: str) -> Tensor:
            if name not in tensors:
                tensors[name] = self._allocated(name)
            return tensors[name].view

        tree = self.tree(rank, allocated)
        self._fetch([tensor for tensor in tensors.values() if tensor.box.numel])
        return tree

    @abstractmethod
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        """Return the objects of one rank, or the common ones, without their tensors.

        Args:
            rank: None for the common ones.
            tensor: Function from the logical name of each tensor in the tree to the value that replaces it.

        Returns:
            The tree; None if the rank saved none.
        """

    @abstractmethod
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        """Copy stored data into memory (every box is inside its tensor)."""

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor of a name, which may be an alias.

        Raises:
            CheckpointError: The checkpoint has no such tensor.
        """
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise self._missing([name])
        return found

    def fill(self, shards: Mapping[str, Shard]) -> None:
        """Copy stored data into shards, in place.

        Each rank fills its own shards and reads only the bytes it needs, at any world size. After an error
        some of the shards may be filled and others not.

        Args:
            shards: The shards to fill, by name or alias.

        Raises:
            CheckpointError: A name is missing, a shape or dtype differs, or a file is damaged.
        """
        missing = [name for name in shards if self.aliases.get(name, name) not in self.tensors]
        if missing:
            raise self._missing(missing)
        wanted: list[Wanted] = []
        for name, shard in shards.items():
            entry = self.entry(name)
            self._require_same(entry, name, shard)
            wanted += [
                Wanted(entry, box, view)
                for box, view in zip(shard.boxes, shard.data, strict=True)
                if box.numel
            ]
        self._fetch(wanted)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read one tensor, or one box of it, into new memory on the CPU."""
        wanted = self._allocated(name, box)
        self._require_inside(wanted.entry, name, wanted.box)
        self._fetch([wanted] if wanted.box.numel else [])
        return wanted.view

    def read_all(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read tensors into new memory on the CPU, by name. Each file is opened once.

        Args:
            names: The names of the tensors, which may be aliases; None for all.
        """
        tensors = {name: self._allocated(name) for name in (self.tensors if names is None else names)}
        self._fetch([tensor for tensor in tensors.values() if tensor.box.numel])
        return {name: tensor.view for name, tensor in tensors.items()}

    def _allocated(self, name: str, box: Box | None = None) -> Wanted:
        """Return a tensor, or one box of it, with new memory to read it into."""
        entry = self.entry(name)
        box = box or Box.whole(entry.shape)
        try:
            return Wanted(entry, box, torch.empty(box.size, dtype=entry.dtype))
        except (
            RuntimeError,
            TypeError,
            OverflowError,
        ) as error:  # out of memory, or more than 64 bits
            raise CheckpointError(
                f"tensor '{name}' of checkpoint '{self.path}' has shape {entry.shape}, of which "
                f"{box.size} cannot be allocated here.",
                remedy="Read a slice of it, or use a machine with more memory.",
            ) from error

    def _missing(self, names: list[str]) -> CheckpointError:
        shown = ", ".join(f"'{name}'" for name in names[:10]) + (", ..." if len(names) > 10 else "")
        return CheckpointError(
            f"checkpoint '{self.path}' has no tensor {shown} ({len(names)} missing).",
            remedy="Check that it belongs to this model; `nnx ckpt inspect` lists what it holds.",
        )

    def _require_same(self, entry: TensorEntry, name: str, shard: Shard) -> None:
        if entry.shape != tuple(shard.shape):
            raise CheckpointError(
                f"tensor '{name}' has shape {entry.shape} in checkpoint '{self.path}', "
                f"but shape {tuple(shard.shape)} in the model.",
                remedy="Build the model with the same sizes as the one that was saved.",
            )
        if entry.dtype != shard.dtype:
            raise CheckpointError(
                f"tensor '{name}' is {entry.dtype} in checkpoint '{self.path}', "
                f"but {shard.dtype} in the model.",
                remedy="Load with the precision that was saved, and convert the model afterwards.",
            )
        for box in shard.boxes:
            self._require_inside(entry, name, box)

    def _require_inside(self, entry: TensorEntry, name: str, box: Box) -> None:
        if any(a + n > full for a, n, full in zip(box.offset, box.size, entry.shape, strict=True)):
            raise CheckpointError(
                f"the requested slice {box} of tensor '{name}' is out of bounds for shape {entry.shape}.",
                remedy="Request a slice within the shape.",
            )
