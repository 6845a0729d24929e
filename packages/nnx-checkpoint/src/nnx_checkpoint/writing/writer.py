"""Save in rounds of all ranks, in the foreground or in the background of training.

1. Every rank describes its shards; the coordinator gathers the descriptions.
2. The coordinator checks them, assigns the boxes, creates the save's directory and sends every rank its plan.
3. Every rank writes its boxes and its own objects; the coordinator writes the index and the common
   objects, and commits.

Planning, writing and committing live in their own modules; this one calls them in order. An asynchronous
save blocks training for one copy only: the foreground encodes the objects and copies the tensors, without
communication, and a thread does the rest. One such save is in flight at a time; see
`nnx_checkpoint.format.inflight`.
"""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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
R = TypeVar("R")


def save(request: SaveRequest) -> None:
    """Write a checkpoint; collective over all ranks, a plain call in a single process.

    The previous checkpoint at this path stays loadable until the new one is complete and on disk.

    Raises:
        CheckpointError: A rank could not describe or write its shards (on every rank). The previous
            checkpoint at this path is then intact.
    """
    one = Save(request, control_group() if request.collective else None)
    one.follow_previous()
    one.complete()


@dataclass(frozen=True, slots=True)
class _Captured:
    """The shards and encoded objects that one rank saves."""

    shards: dict[str, Shard]
    private: frozenset[str]
    common: dict[str, bytes]
    own: dict[str, bytes]


class Save:
    """One save on one rank.

    Args:
        request: The tensors, objects and options of the save.
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
        """Wait for the save in flight (only one may run), and make this save fail if that one failed.

        Raises:
            CheckpointError: The save in flight failed.
        """
        previous = inflight.current()
        try:
            inflight.settle()
        except Exception as error:
            if self.group is None or (previous is not None and previous.collective):
                raise
            self.fail(error)  # a rank that raised alone would leave the others waiting

    def fail(self, error: Exception) -> None:
        """Make `complete` fail on every rank with this rank's error."""
        self._failure = error

    def capture(self, stage: Callable[[dict[str, Shard]], dict[str, Shard]] = lambda shards: shards) -> None:
        """Encode the objects and lift their tensors. `complete` calls it unless the caller did.

        Args:
            stage: Function from shards to copies of them, for a save that runs while the caller changes the
                tensors.

        Raises:
            CheckpointError: An object cannot be saved.
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
                    remedy="Rename the tensor; names starting with 'objects.' and 'rank.' are reserved.",
                )
            shards[name] = shard
        private = {n for n, value in common.tensors.items() if not isinstance(value, (Shard, DTensor))}
        self._captured = _Captured(stage(shards), frozenset(private | set(own.tensors)), objects, own_objects)

    def complete(self) -> None:
        """Plan, write and commit. Collective over the group.

        Raises:
            CheckpointError: A rank could not describe or write its shards (on every rank).
        """
        try:
            self._in_rounds(self._commit)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, for example: `exchange` handles only `Exception`
            if self.transaction is not None:
                self.transaction.discard()
            raise
        finally:
            if self.transaction is not None:
                self.transaction.release()

    def _in_rounds(self, decide: Callable[[list[Files]], list[R]]) -> R:
        """Describe, plan and write; return the coordinator's answer to the written files."""
        descriptions = gather_descriptions(self.group, self._describe, doing=self.doing)
        rank_plan = exchange(
            self.group,
            self._room,
            lambda rooms: self._plan(descriptions(), rooms),
            doing=self.doing,
            give_up=self._give_up,
        )
        broadcast = share(self.group, self.plan.broadcast if self.plan else None, doing=self.doing)
        return exchange(
            self.group,
            lambda: self._write(rank_plan, broadcast),
            decide,
            doing=self.doing,
            give_up=self._give_up,
        )

    def _room(self) -> int | None:
        """Return the bytes that this rank's place has for a save; None if only writing tells."""
        return None

    def _describe(self) -> list[Description]:
        """Describe shared tensors apart from this rank's own, so that many ranks send one digest."""
        shards, private = self._capture_once().shards, self._capture_once().private
        shared = {name: shard for name, shard in shards.items() if name not in private}
        own = {name: shards[name] for name in private if name in shards}
        self.descriptions = [describe(shared, aliases=self.request.aliases)]
        self.descriptions += [describe(own)] if own else []
        return self.descriptions

    def _capture_once(self) -> _Captured:
        if self._failure is not None:
            raise self._failure
        if self._captured is None:
            self.capture()
        assert self._captured is not None
        return self._captured

    def _plan(self, descriptions: list[list[Description]], rooms: list[int | None]) -> list[RankPlan]:
        self.plan = make_plan(descriptions, self.request.state_dict_type)
        self.transaction = begin(self.path)
        return self.plan.rank_plans(self.transaction.save_id)

    def _write(self, rank_plan: RankPlan, broadcast: list[bytes]) -> Files:
        directory = self.path / rank_plan.save_id
        entries, data = select(self.descriptions, self._capture_once().shards, broadcast, rank_plan)
        files = write_rank_file(directory, self.rank, entries, data)
        files |= _write_all(directory, self._capture_once().own)
        if files and self.rank:
            directory.sync()  # the coordinator syncs its own names in `commit`
        return files

    def _commit(self, files_of_ranks: list[Files]) -> list[None]:
        assert self.plan is not None
        assert self.transaction is not None
        files = {name: entry for files in files_of_ranks for name, entry in files.items()}
        files |= _write_all(self.transaction.directory, self._capture_once().common)
        self.transaction.finish(
            self.plan.index(),
            files,
            writer=writer_info(self.size),
            provenance=self.request.provenance,
            keep_previous=self.request.keep_previous,
        )
        return [None] * self.size

    def _give_up(self) -> str:
        return "Nothing was changed at this path." if self.transaction is None else self.transaction.discard()


def writer_info(world_size: int) -> dict[str, Any]:
    """Return the manifest's record of the writing program: world size and versions."""
    return {"world_size": world_size, "torch": str(torch.__version__), "python": platform.python_version()}


def encode_objects(rank: int | None, tree: Any, opaque: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of an encoded tree: its JSON, and a pickle of the objects without encoding."""
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
    except Exception as error:  # the object's own methods may raise anything
        raise CheckpointError(
            f"an object among {sorted(objects)} cannot be pickled: {error}.",
            remedy="Remove it from the saved objects.",
        ) from error


def _shards_of(lifted: Mapping[str, Tensor | Shard], *, keep_plain: bool = True) -> dict[str, Shard]:
    """Describe lifted tensors (without plain tensors on ranks that do not store them)."""
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
