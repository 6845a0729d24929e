"""Saving: all ranks together, in rounds, in the foreground or while training goes on.

1. Every rank describes its shards; the coordinator collects the descriptions.
2. The coordinator checks them, assigns the boxes, makes the save's directory and tells every rank what
   is its own.
3. Every rank writes its boxes and its own objects; the coordinator writes the index and the common
   objects, and commits.

Planning, writing and committing live in their own modules; this one only puts them in order. An asynchronous
save makes training wait for one copy only: the foreground encodes the objects and copies the tensors, without
talking to other ranks, and a thread does the rest. One such save is in flight at a time; see
`nnx_checkpoint.format.inflight`.
"""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nnx_base.errors import CheckpointError
from nnx_base.ranks import control_group, exchange, rank_and_size, share
from nnx_base.shard import Box, Shard, shard_of
from nnx_checkpoint.format import inflight
from nnx_checkpoint.format.codec import Encoder
from nnx_checkpoint.format.manifest import FileEntry, digest, objects_file
from nnx_checkpoint.format.rankfile import write_rank_file
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.locations import place_of
from nnx_checkpoint.writing.description import Description, describe, gather_descriptions
from nnx_checkpoint.writing.plan import Plan, RankPlan, make_plan, select
from nnx_checkpoint.writing.request import SaveRequest
from nnx_checkpoint.writing.transaction import Transaction, begin

__all__ = ["Files", "save", "write_objects", "writer_info"]

Files = dict[str, FileEntry]


def save(request: SaveRequest) -> None:
    """Write a checkpoint; collective over all ranks, a plain call in a single process.

    The previous checkpoint at this path stays loadable until the new one is complete and on disk.

    Raises:
        CheckpointError: On every rank, if any rank could not describe or write its shards. The previous
            checkpoint at this path is then intact.
    """
    one = Save(request, control_group() if request.collective else None)
    one.follow_previous()
    one.complete()


@dataclass(frozen=True, slots=True)
class _Captured:
    """What one rank saves, in the form in which it is described and written."""

    shards: dict[str, Shard]
    private: frozenset[str]
    common: dict[str, bytes]
    own: dict[str, bytes]


class Save:
    """One save on one rank.

    Args:
        request: The tensors and objects to save, and how.
        group: The ranks that save together, over a CPU backend; None for this process alone.
    """

    def __init__(self, request: SaveRequest, group: dist.ProcessGroup | None) -> None:
        self.request = request
        self.group = group
        self.rank, self.size = rank_and_size(group)
        self.doing = f"saving '{request.path}'"
        self.path = place_of(request.path)
        self.transaction: Transaction | None = None
        self.plan: Plan | None = None
        self.descriptions: list[Description] = []
        self._captured: _Captured | None = None
        self._failure: Exception | None = None

    def follow_previous(self) -> None:
        """Wait for the save in flight: there is one at a time. Its error becomes that of this one.

        Raises:
            CheckpointError: The save in flight failed.
        """
        previous = inflight.current()
        try:
            inflight.settle()
        except Exception as error:
            if self.group is None or (previous is not None and previous.collective):
                raise
            self.fail(error)  # only this rank knows of it: the others must not be left waiting

    def fail(self, error: Exception) -> None:
        """Let `complete` fail on every rank, because of an error on this one."""
        self._failure = error

    def capture(self, stage: Callable[[dict[str, Shard]], dict[str, Shard]] = lambda shards: shards) -> None:
        """Encode the objects and lift their tensors; called by `complete`, if it was not before.

        Args:
            stage: Gives the same shards with data of its own, for a save that `complete` ends after the
                caller has gone on to change what it passed.

        Raises:
            CheckpointError: Something among the objects cannot be saved.
        """
        request = self.request
        common = Encoder("objects", request.opaque if self.rank == 0 else "skip")
        tree = common.encode(request.objects)
        objects = encode_objects(None, tree, common.opaque_objects) if self.rank == 0 else {}
        own = Encoder(f"rank.{self.rank}", request.opaque)
        own_objects = {}
        if request.rank_objects is not None:
            own_objects = encode_objects(self.rank, own.encode(request.rank_objects), own.opaque_objects)
        shards = dict(request.tensors)
        lifted = _shards_of(common.tensors, keep_plain=self.rank == 0) | _shards_of(own.tensors)
        for name, shard in lifted.items():
            if name in shards:
                raise CheckpointError(
                    f"the tensor name '{name}' is reserved for a tensor inside the saved objects.",
                    remedy="Rename the tensor; names starting with 'objects.' and 'rank.' are taken.",
                )
            shards[name] = shard
        private = {n for n, value in common.tensors.items() if not isinstance(value, (Shard, DTensor))}
        self._captured = _Captured(stage(shards), frozenset(private | set(own.tensors)), objects, own_objects)

    def complete(self) -> None:
        """Plan, write and commit. Collective over the group.

        Raises:
            CheckpointError: On every rank, if any rank could not describe or write its part.
        """
        try:
            descriptions = gather_descriptions(self.group, self._describe, doing=self.doing)
            rank_plan = exchange(
                self.group,
                lambda: None,
                lambda _: self._plan(descriptions()),
                doing=self.doing,
                give_up=self._give_up,
            )
            broadcast = share(self.group, self.plan.broadcast if self.plan else None, doing=self.doing)
            exchange(
                self.group,
                lambda: self._write(rank_plan, broadcast),
                self._commit,
                doing=self.doing,
                give_up=self._give_up,
            )
        except Exception:
            raise
        except BaseException:  # such as Ctrl-C, of which `exchange` knows nothing
            if self.transaction is not None:
                self.transaction.discard()
            raise
        finally:
            if self.transaction is not None:
                self.transaction.release()

    def _describe(self) -> list[Description]:
        """What all ranks may know, and what only this one does, so that the former is the same on many."""
        shards, private = self._taken().shards, self._taken().private
        shared = {name: shard for name, shard in shards.items() if name not in private}
        own = {name: shards[name] for name in private if name in shards}
        self.descriptions = [describe(shared, aliases=self.request.aliases)]
        self.descriptions += [describe(own)] if own else []
        return self.descriptions

    def _taken(self) -> _Captured:
        if self._failure is not None:
            raise self._failure
        if self._captured is None:
            self.capture()
        assert self._captured is not None
        return self._captured

    def _plan(self, descriptions: list[list[Description]]) -> list[RankPlan]:
        self.plan = make_plan(descriptions, self.request.state_dict_type)
        self.transaction = begin(self.path)
        return self.plan.rank_plans(self.transaction.save_id)

    def _write(self, rank_plan: RankPlan, broadcast: list[bytes]) -> Files:
        directory = self.path / rank_plan.save_id
        entries, data = select(self.descriptions, self._taken().shards, broadcast, rank_plan)
        files = write_rank_file(directory, self.rank, entries, data)
        files |= _write_all(directory, self._taken().own)
        if files and self.rank:
            directory.sync()
        return files

    def _commit(self, files_of_ranks: list[Files]) -> list[None]:
        assert self.plan is not None
        assert self.transaction is not None
        files = {name: entry for files in files_of_ranks for name, entry in files.items()}
        files |= _write_all(self.transaction.directory, self._taken().common)
        self.transaction.finish(
            self.plan.index(),
            files,
            writer=writer_info(self.size),
            provenance=self.request.provenance,
            keep_previous=self.request.keep_previous,
        )
        return [None] * self.size

    def _give_up(self) -> str:
        return "Nothing was changed there." if self.transaction is None else self.transaction.discard()


def writer_info(world_size: int) -> dict[str, Any]:
    """What the manifest records about the program that writes."""
    return {"world_size": world_size, "torch": str(torch.__version__), "python": platform.python_version()}


def encode_objects(rank: int | None, tree: Any, opaque: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of an encoded tree: itself, and beside it what was set aside for pickle."""
    name = objects_file(rank)
    files = {name: json.dumps(tree, separators=(",", ":"), allow_nan=False).encode() + b"\n"}
    if opaque:
        buffer = io.BytesIO()
        _pickle(dict(opaque), buffer)
        files[f"{name.rsplit('.', 1)[0]}.bin"] = buffer.getvalue()
    return files


def write_objects(directory: Place, rank: int | None, tree: Any, opaque: Mapping[str, Any]) -> Files:
    """Write an encoded tree."""
    return _write_all(directory, encode_objects(rank, tree, opaque))


def _write_all(directory: Place, contents: Mapping[str, bytes]) -> Files:
    for file, content in contents.items():
        (directory / file).write(content)
    return {file: FileEntry(len(raw), digest(raw), len(raw)) for file, raw in contents.items()}


def _pickle(objects: dict[str, Any], buffer: io.BytesIO) -> None:
    try:
        torch.save(objects, buffer)
    except Exception as error:  # pickle raises what the object's own methods raise
        raise CheckpointError(
            f"an object among {sorted(objects)} cannot be pickled: {error}.",
            remedy="Remove it from what is saved.",
        ) from error


def _shards_of(lifted: Mapping[str, Tensor | Shard], *, keep_plain: bool = True) -> dict[str, Shard]:
    """Describe lifted tensors; on ranks that do not store plain ones, leave those out."""
    shards: dict[str, Shard] = {}
    for name, value in lifted.items():
        if isinstance(value, Shard):
            shards[name] = value
        elif isinstance(value, DTensor):
            shards[name] = shard_of(value)
        elif keep_plain:
            tensor = value.detach()
            shards[name] = Shard(tuple(value.shape), value.dtype, (Box.whole(value.shape),), (tensor,))
    return shards
