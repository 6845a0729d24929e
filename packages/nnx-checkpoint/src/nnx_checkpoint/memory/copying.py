"""Write a copy of a run's state into the memory of its hosts.

A copy is a save (`nnx_checkpoint.writing.writer`) whose files lie in several places: each rank writes its own
into the memory of its host and sends it to its buddy on the next host. When all files are where they belong,
the first rank of each host writes the common ones and the manifest, which commits the copy there. Only after
that on every host the copy before it goes. So a kill at any moment leaves one complete copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_base.ranks import exchange
from nnx_checkpoint.format.index import INDEX
from nnx_checkpoint.format.manifest import MANIFEST, FileEntry, digest, encode_manifest
from nnx_checkpoint.memory.hosts import HostMemory, Hosts
from nnx_checkpoint.memory.moves import Move, move, prepare
from nnx_checkpoint.writing.description import Description
from nnx_checkpoint.writing.plan import RankPlan, make_plan
from nnx_checkpoint.writing.request import SaveRequest
from nnx_checkpoint.writing.transaction import describe_save, new_id, remove
from nnx_checkpoint.writing.writer import Files, Save, writer_info

__all__ = ["HOLDERS", "STEP", "MemoryCopy"]

STEP, HOLDERS = "step", "holders"
"""Keys of the provenance: the step of the copy, and the hosts that hold each rank's state."""
_INTACT = "The copy before it is intact."


@dataclass
class _Order:
    """The coordinator's answer to a rank, when all ranks have written.

    Attributes:
        moves: The files that the rank sends and gets.
        common: The files that it writes last; none if another rank leads its host.
    """

    moves: list[Move] = field(default_factory=list)
    common: dict[str, bytes] = field(default_factory=dict)


class MemoryCopy(Save):
    """One copy, on one rank.

    Args:
        request: The tensors and objects of the copy, with the step in the provenance.
        group: The ranks, over a CPU backend; None for this process alone.
        memory: The memory of this rank's host.
        hosts: The hosts of all ranks.
    """

    def __init__(
        self, request: SaveRequest, group: dist.ProcessGroup | None, memory: HostMemory, hosts: Hosts
    ) -> None:
        super().__init__(request, group)
        self.doing = f"copying step {request.provenance[STEP]} to memory"
        self.memory, self.hosts = memory, hosts
        self.save_id = ""

    @override
    def complete(self) -> None:
        """Write, send and commit the copy, and remove the one before it. Collective over the group.

        Raises:
            CheckpointError: A rank has no memory left, for example (on every rank).
        """
        leads = self.hosts.leads(self.rank)
        try:
            order = self._in_rounds(self._orders)
            if len(self.hosts.names) > 1:
                directory = self.memory.path / self.save_id
                self._round(lambda: prepare(order.moves, directory, self.rank))
                move(order.moves, directory, self.group)
                self._round(lambda: None)
            self._round(lambda: self._commit_here(order.common))
        except BaseException:
            if leads and self.save_id and (self.path / self.save_id / MANIFEST).kind() is None:
                remove(self.path / self.save_id)
            raise
        if leads:
            self.memory.keep_only(self.save_id)

    def _round(self, work: Any) -> None:
        exchange(self.group, work, lambda each: [None] * self.size, doing=self.doing, give_up=self._give_up)

    @override
    def _room(self) -> int:
        return self.memory.available()

    @override
    def _plan(self, descriptions: list[list[Description]], rooms: list[int | None]) -> list[RankPlan]:
        self.plan = make_plan(descriptions, self.request.state_dict_type)
        self._refuse_small_memory(self.plan.nbytes(), [room or 0 for room in rooms])
        return self.plan.rank_plans(new_id(self.path))

    def _refuse_small_memory(self, nbytes: list[int], rooms: list[int]) -> None:
        """Refuse copies if a host has no room for two, of all states that it holds."""
        for host, name in enumerate(self.hosts.names):
            buddies = (self.hosts.buddy(rank) for rank in range(self.size))
            held = self.hosts.ranks(host)
            held += [rank for rank, buddy in enumerate(buddies) if buddy in self.hosts.ranks(host)]
            needed = 2 * sum(nbytes[rank] for rank in held)
            room = min(rooms[rank] for rank in self.hosts.ranks(host))
            if needed > room:
                raise CheckpointError(
                    f"the memory of {name} is too small: two copies of the state of ranks "
                    f"{', '.join(map(str, sorted(held)))} take {needed / 1e6:,.1f} MB, and "
                    f"'{self.memory.root}' has room for {room / 1e6:,.1f} MB.",
                    remedy="Enlarge it (--shm-size of a container; mount -o remount,size=... /dev/shm), "
                    "remove copies of other runs there, add nodes, or leave memory_checkpoint out.",
                )

    @override
    def _write(self, rank_plan: RankPlan, broadcast: list[bytes]) -> Files:
        self.save_id = rank_plan.save_id
        (self.path / self.save_id).make()
        return super()._write(rank_plan, broadcast)

    def _orders(self, files_of_ranks: list[Files]) -> list[_Order]:
        assert self.plan is not None
        orders = [_Order() for _ in files_of_ranks]
        number = 0
        for rank, files in enumerate(files_of_ranks):
            buddy = self.hosts.buddy(rank)
            for name, entry in files.items() if buddy is not None else ():
                assert buddy is not None
                moved = Move(name, entry.size, rank, buddy, number)
                orders[rank].moves.append(moved)
                orders[buddy].moves.append(moved)
                number += 1
        common = self._common({name: entry for files in files_of_ranks for name, entry in files.items()})
        for rank, order in enumerate(orders):
            order.common = common if self.hosts.leads(rank) else {}
        return orders

    def _common(self, files: Files) -> dict[str, bytes]:
        """Return the common files of the copy, the manifest last."""
        assert self.plan is not None
        objects = self._capture_once().common
        files = files | {name: FileEntry(len(raw), digest(raw), len(raw)) for name, raw in objects.items()}
        index, manifest = describe_save(
            self.save_id,
            self.plan.index(),
            files,
            writer=writer_info(self.size),
            provenance={
                **self.request.provenance,
                HOLDERS: [self.hosts.holders(rank) for rank in range(self.size)],
            },
            where=str(self.path / self.save_id / INDEX),
        )
        return {**objects, INDEX: index, MANIFEST: encode_manifest(manifest)}

    def _commit_here(self, common: dict[str, bytes]) -> None:
        directory = self.path / self.save_id
        for name, raw in common.items():
            (directory / name).write(raw)
        if common:
            publish(self.memory, self.save_id, common[MANIFEST])

    @override
    def _give_up(self) -> str:
        return _INTACT if len(self.memory.saves()) > 1 else ""


def publish(memory: HostMemory, save_id: str, manifest: bytes) -> None:
    """Make a copy the checkpoint at the path of this host's memory."""
    (memory.place / MANIFEST).replace(manifest, temporary=f".{MANIFEST}.{save_id}.tmp")
