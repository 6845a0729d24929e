"""Find the newest complete copy that the hosts of a run still hold, and bring its files to all of them.

After a restart some hosts may be new and some files damaged. Every byte is checked before it is used. A file
with one good holder is sent to the hosts without it; a copy with a file that has none is refused, and the
message names both holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from nnx_base.errors import CheckpointError
from nnx_base.ranks import all_gather_object, rank_and_size, together
from nnx_checkpoint.format.manifest import MANIFEST, Manifest, decode_manifest
from nnx_checkpoint.format.source import Source
from nnx_checkpoint.memory.copying import HOLDERS, STEP, publish
from nnx_checkpoint.memory.hosts import HostMemory, Hosts
from nnx_checkpoint.memory.moves import Move, move, prepare
from nnx_checkpoint.reading.verification import verify_files

__all__ = ["Found", "find"]


@dataclass(frozen=True)
class Found:
    """A complete copy, on every host.

    Attributes:
        save_id: Its id.
        step: The global step of its state.
        hosts: The hosts that held it.
    """

    save_id: str
    step: int
    hosts: tuple[str, ...]


@dataclass
class _Copy:
    """A copy that some hosts hold.

    Attributes:
        manifest: Its manifest.
        raw: The bytes of the manifest.
        files: For each host the files that it holds, with the right length.
    """

    manifest: Manifest
    raw: bytes
    files: list[set[str]] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.manifest.provenance[STEP])


def find(memory: HostMemory, hosts: Hosts, group: dist.ProcessGroup | None) -> tuple[Found | None, list[str]]:
    """Restore the newest usable copy on every host. Collective.

    Args:
        memory: The memory of this rank's host.
        hosts: The hosts of all ranks.
        group: The ranks, over a CPU backend; None for this process alone.

    Returns:
        The copy, or None; and a sentence about each newer copy that was refused.
    """
    copies, refused = _newest_first(_survey(memory, hosts, group), hosts)
    for copy in copies:
        problem = _Restoring(copy, memory, hosts, group).run()
        if not problem:
            names = [name for name, files in zip(hosts.names, copy.files, strict=True) if files]
            return Found(copy.manifest.save_id, copy.step, tuple(names)), refused
        refused.append(f"The copy of step {copy.step} in memory is refused: {problem}.")
    return None, refused


def _survey(
    memory: HostMemory, hosts: Hosts, group: dist.ProcessGroup | None
) -> list[Mapping[str, tuple[bytes, Mapping[str, int]]]]:
    """Return what each host holds: for each id the manifest, and the sizes of the files. Collective."""
    here: dict[str, tuple[bytes, Mapping[str, int]]] = {}
    if hosts.leads(rank_and_size(group)[0]):
        for save_id in memory.saves():
            with suppress(CheckpointError):
                directory = memory.place / save_id
                sizes = directory.sizes(directory.names())
                raw = (directory / MANIFEST).read(sizes[MANIFEST]) if MANIFEST in sizes else b""
                here[save_id] = raw, sizes
    found = all_gather_object(here, group)
    return [found[hosts.ranks(host)[0]] for host in range(len(hosts.names))]


def _newest_first(
    seen: Sequence[Mapping[str, tuple[bytes, Mapping[str, int]]]], hosts: Hosts
) -> tuple[list[_Copy], list[str]]:
    """Return the committed copies, and a sentence about each whose manifest no host has intact."""
    copies: dict[str, _Copy] = {}
    damaged: dict[str, list[str]] = {}
    for name, of_host in zip(hosts.names, seen, strict=True):
        for save_id, (raw, _) in of_host.items():
            if raw and save_id not in copies:
                try:
                    copies[save_id] = _Copy(decode_manifest(raw, source=save_id), raw)
                except CheckpointError:
                    damaged.setdefault(save_id, []).append(name)
    for save_id, copy in copies.items():
        for of_host in seen:
            sizes = of_host[save_id][1] if save_id in of_host else {}
            files = copy.manifest.files.items()
            copy.files.append({name for name, entry in files if sizes.get(name) == entry.size})
    return sorted(copies.values(), key=lambda copy: (copy.step, copy.manifest.save_id), reverse=True), [
        f"A copy in memory is refused: its manifest is damaged on {' and '.join(names)}."
        for save_id, names in damaged.items()
        if save_id not in copies
    ]


class _Restoring:
    """The restoring of one copy on all hosts; every rank makes the same decisions."""

    def __init__(
        self, copy: _Copy, memory: HostMemory, hosts: Hosts, group: dist.ProcessGroup | None
    ) -> None:
        self.copy, self.memory, self.hosts, self.group = copy, memory, hosts, group
        self.rank, self.size = rank_and_size(group)
        self.host = hosts.of_rank[self.rank]
        self.files = copy.manifest.files
        self.good = [set(files) for files in copy.files]
        self.damage: dict[str, str] = {}

    def run(self) -> str:
        """Return why the copy cannot be used; empty if it is complete on every host."""
        common = [name for name in self.files if _rank_of(name) is None]
        problem = self._missing()
        if problem:
            return problem
        self._fetch(common)
        self._verify()
        problem = self._missing()
        if problem:
            return problem
        self._fetch(self.files)
        with together(self.group, doing="restoring a copy from memory"):
            if self.hosts.leads(self.rank):
                directory = self.memory.place / self.copy.manifest.save_id
                (directory / MANIFEST).remove()
                (directory / MANIFEST).write(self.copy.raw)
                publish(self.memory, self.copy.manifest.save_id, self.copy.raw)
        return ""

    def _missing(self) -> str:
        """Return a sentence about the first file without a good holder."""
        for name in self.files:
            if not any(name in files for files in self.good):
                rank = _rank_of(name)
                every = self.copy.manifest.provenance[HOLDERS]
                holders = list(dict.fromkeys(itertools.chain(*every))) if rank is None else every[rank]
                state = "the common state" if rank is None else f"the state of rank {rank}"
                where = " and ".join(holders)
                if name in self.damage:
                    return f"{state} is damaged on {where} ({self.damage[name]})"
                return f"{state} is gone with {'both holders, ' if len(holders) > 1 else ''}{where}"
        return ""

    def _fetch(self, names: Iterable[str]) -> None:
        """Send files from a good holder to the hosts without them. Collective."""
        moves: list[Move] = []
        for name in names:
            source = next(host for host, files in enumerate(self.good) if name in files)
            for host, files in enumerate(self.good):
                if name not in files:
                    pair = self.hosts.ranks(source)[0], self.hosts.ranks(host)[0]
                    moves.append(Move(name, self.files[name].size, *pair, len(moves)))
                    files.add(name)
        directory = self.memory.path / self.copy.manifest.save_id
        with together(self.group, doing="bringing a copy to every host"):
            prepare(moves, directory, self.rank)
        move(moves, directory, self.group)
        all_gather_object(None, self.group)  # files are complete on all hosts now

    def _verify(self) -> None:
        """Check every byte of every holder, each rank a share of its host's files. Collective."""
        held = sorted(self.good[self.host])
        own = self.hosts.ranks(self.host).index(self.rank)
        share = [name for name in held if (_rank_of(name) or 0) % len(self.hosts.ranks(self.host)) == own]
        found: dict[str, str] = {}
        try:
            damaged = verify_files(Source(self.memory.place, self.copy.manifest), share)
            found = {each.file.rpartition("/")[2]: each.problem for each in reversed(damaged)}
        except CheckpointError as error:
            found = dict.fromkeys(share, error.message)
        for rank, damage in enumerate(all_gather_object(found, self.group)):
            self.good[self.hosts.of_rank[rank]] -= damage.keys()
            self.damage |= {name: problem.rstrip(".") for name, problem in damage.items()}


def _rank_of(file: str) -> int | None:
    """Return the rank whose state a file has; None for a common file.

    Example:
        >>> _rank_of("r00012.sums"), _rank_of("index.json")
        (12, None)
    """
    number = file.partition(".")[0].removeprefix("r")
    return int(number) if number.isdigit() else None
