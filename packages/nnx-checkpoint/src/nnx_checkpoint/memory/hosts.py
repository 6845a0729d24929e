"""The memory of the hosts of a run: a directory on each, and the ranks that share it.

A copy is a save in the format of checkpoints below a memory-backed directory, such as ``/dev/shm``. The files
belong to the host: they outlive a killed process, and a lost host takes them with it. Ranks share a host if
they see the same file in that directory, so containers with private memory count as hosts.
This module owns the directory, its lock and its end. It knows nothing of tensors.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from nnx_base.errors import CheckpointError
from nnx_base.ranks import all_gather_object, rank_and_size, together
from nnx_checkpoint.format.manifest import MANIFEST, is_save_id
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.storage.locations import LocalPlace
from nnx_checkpoint.writing.transaction import remove

_TOKEN, _LOCK = ".host", ".run.lock"
_ABANDONED = 3600.0
"""Seconds without a change after which copies that no process locks are removed."""
_PATIENCE = 15.0
"""Seconds in which the killed processes of the run before this one release the lock."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, in the order of their first ranks.

    Attributes:
        names: The name of each host.
        of_rank: The number of each rank's host.

    Example:
        >>> hosts = Hosts(("node0", "node1"), (0, 0, 1))
        >>> [hosts.buddy(rank) for rank in range(3)]
        [2, 2, 0]
        >>> hosts.holders(2)
        ['node1', 'node0']
    """

    names: tuple[str, ...]
    of_rank: tuple[int, ...]

    def ranks(self, host: int) -> list[int]:
        """Return the ranks of a host; the first one leads it."""
        return [rank for rank, own in enumerate(self.of_rank) if own == host]

    def leads(self, rank: int) -> bool:
        """Return True for the first rank of a host."""
        return self.of_rank.index(self.of_rank[rank]) == rank

    def buddy(self, rank: int) -> int | None:
        """Return the rank on the next host that holds a second copy; None on a single host."""
        if len(self.names) == 1:
            return None
        here = self.of_rank[rank]
        there = self.ranks((here + 1) % len(self.names))
        return there[self.ranks(here).index(rank) % len(there)]

    def holders(self, rank: int) -> list[str]:
        """Return the names of the hosts that hold a rank's state."""
        buddy = self.buddy(rank)
        return [self.names[self.of_rank[each]] for each in (rank, buddy) if each is not None]


class HostMemory:
    """The directory of a run's copies on this host.

    Args:
        directory: The memory-backed directory of the host.
        run: The name of the run, which a restart keeps.
        number: The number of the fit in the process, from 1.

    Attributes:
        path: The directory of the copies, which is also the path of a checkpoint.

    Raises:
        CheckpointError: The directory does not exist, or another user owns the one in it.
    """

    def __init__(self, directory: str, run: str, number: int) -> None:
        self.run = run
        self.root = Path(directory) / f"nnx-{os.geteuid()}"
        self.path = self.root / f"{quote(run, safe='')[:200]}.{number}"
        self._fd: int | None = None
        self._owner = os.getpid()
        if not Path(directory).is_dir():
            raise CheckpointError(
                f"memory_directory={directory!r} is no directory on {socket.gethostname()}.",
                remedy="Pass a directory that is in memory on every host, such as '/dev/shm'.",
            )
        with explained("create", self.root):
            self.root.mkdir(mode=0o700, exist_ok=True)
            found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CheckpointError(
                f"'{self.root}' is not a directory of this user.", remedy="Remove it, or pass another path."
            )
        with explained("create", self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)

    @property
    def place(self) -> LocalPlace:
        """The directory as a place of the storage layer."""
        return LocalPlace(self.path)

    def token(self) -> str:
        """Return a text that all processes with this memory read, and no others."""
        token = self.path / _TOKEN
        with explained("read", token):
            if not token.exists():
                made = self.path / f"{_TOKEN}.{secrets.token_hex(8)}"
                made.write_text(secrets.token_hex(16), encoding="ascii")
                with suppress(FileExistsError):
                    os.link(made, token)  # atomic: a reader never sees an empty file
                made.unlink()
            return token.read_text(encoding="ascii")

    def lock(self, *, alone: bool) -> None:
        """Hold the directory until the end of this process.

        Args:
            alone: True first waits until no process of an earlier start holds it.

        Raises:
            CheckpointError: Another run of this name is running.
        """
        with explained("lock", self.path):
            self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            end = time.monotonic() + _PATIENCE
            while alone and not _lock(self._fd):
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"another run with the name {self.run!r} keeps copies on {socket.gethostname()}.",
                        remedy="Give each run a name of its own: NNX_RUN_ID, or torchrun's --rdzv-id.",
                    )
                time.sleep(0.1)
            fcntl.lockf(self._fd, fcntl.LOCK_SH)

    def saves(self) -> list[str]:
        """Return the ids of all copies here, complete or not."""
        return [name for name in self.place.names() if is_save_id(name)]

    def keep_only(self, save_id: str | None) -> None:
        """Remove all copies but one; None removes all."""
        if save_id is None:
            (self.place / MANIFEST).remove()
        for name in self.saves():
            if name != save_id:
                remove(self.place / name)

    def available(self) -> int:
        """Return the bytes that copies may take here: free ones, and those of the present copies."""
        status = os.statvfs(self.path)
        free = [status.f_bavail * status.f_frsize] if status.f_blocks else []
        with suppress(OSError, ValueError):
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    free.append(int(line.split()[1]) * 1024)
        with suppress(OSError, ValueError):  # a container's limit, where there is one
            group = Path("/sys/fs/cgroup")
            limit = int((group / "memory.max").read_text())
            free.append(limit - int((group / "memory.current").read_text()))
        saves = [self.place / name for name in self.saves()]
        taken = sum(sum(save.sizes(save.names()).values()) for save in saves)
        return max(0, min(free, default=0)) + taken

    def remove_abandoned(self) -> None:
        """Remove the copies of other runs that ended without removing them."""
        with suppress(OSError):
            for path in self.root.iterdir():
                if path == self.path or not path.is_dir() or time.time() - _newest(path) < _ABANDONED:
                    continue
                fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if _lock(fd):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(fd)

    def close(self, *, finished: bool) -> None:
        """Release the directory; the last process of a finished run removes it.

        Args:
            finished: True if the run needs its copies no more.
        """
        fd, self._fd = self._fd, None
        if fd is None or os.getpid() != self._owner:
            return
        if finished:
            fcntl.lockf(fd, fcntl.LOCK_UN)  # of two that keep a shared lock, none would get it alone
            if _lock(fd):
                shutil.rmtree(self.path, ignore_errors=True)
                with suppress(OSError):  # copies of another run are there
                    self.root.rmdir()
        os.close(fd)


def join(directory: str, run: str, number: int, group: dist.ProcessGroup | None) -> tuple[HostMemory, Hosts]:
    """Open the memory of each rank's host, and find the ranks that share it. Collective.

    Args:
        directory: See `HostMemory`.
        run: See `HostMemory`.
        number: See `HostMemory`.
        group: The ranks, over a CPU backend; None for this process alone.

    Raises:
        CheckpointError: A directory cannot be used, or another run of this name is running (on every rank).
    """
    rank, _ = rank_and_size(group)
    doing = "opening the memory for copies"
    memory: HostMemory | None = None
    token = ""
    with together(group, doing=doing):
        memory = HostMemory(directory, run, number)
        token = memory.token()
    assert memory is not None
    hosts = _arrange(all_gather_object((token, socket.gethostname()), group))
    for leading in (True, False):
        with together(group, doing=doing):
            if hosts.leads(rank) is leading:
                memory.lock(alone=leading)
    if hosts.leads(rank):
        memory.remove_abandoned()
    return memory, hosts


def _arrange(found: Sequence[tuple[str, str]]) -> Hosts:
    tokens = list(dict.fromkeys(token for token, _ in found))
    names = dict(reversed(found))
    return Hosts(tuple(names[token] for token in tokens), tuple(tokens.index(token) for token, _ in found))


def _lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _newest(path: Path) -> float:
    """Return the time of the last copy in a directory."""
    return max((each.lstat().st_mtime for each in (path, *path.iterdir())), default=0.0)
