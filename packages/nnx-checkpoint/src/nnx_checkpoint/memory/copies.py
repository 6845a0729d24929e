"""`Copies`: the copies in memory that one run keeps of its state, as each rank sees them.

One copy is written at a time, by a thread, on a process group of its own. A background save to disk, which
may take much longer, neither waits for it nor holds it up.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from nnx_base.errors import NnxError
from nnx_base.ranks import copy_group, rank_and_size
from nnx_checkpoint.format.inflight import PendingSave
from nnx_checkpoint.memory.copying import MemoryCopy
from nnx_checkpoint.memory.finding import Found, find
from nnx_checkpoint.memory.hosts import join
from nnx_checkpoint.writing.copy import Arena
from nnx_checkpoint.writing.request import SaveRequest

__all__ = ["Copies", "name_of_run"]

log = logging.getLogger("nnx.memory")
_numbers = itertools.count(1)


def name_of_run(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of this run that a restart keeps; None if the launcher gives none.

    Example:
        >>> name_of_run({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"})
        'slurm-17.0'
    """
    given = environment.get("NNX_RUN_ID")
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default, the same for all runs
    slurm = environment.get("SLURM_JOB_ID")
    if given:
        return given
    if elastic != "none":
        return elastic
    return f"slurm-{slurm}.{environment.get('SLURM_STEP_ID', '0')}" if slurm else None


class Copies:
    """The copies of one fit. Constructing it is collective, and so are all methods but `close`.

    Restarted processes find them by the name of the run, and by the number of the fit in the process, because
    a script may train several times.

    Args:
        directory: The memory-backed directory of each host.
        run: The name of the run.

    Attributes:
        stalls: The seconds in which training waited for each copy.

    Raises:
        CheckpointError: A directory cannot be used, or another run of this name is running.
    """

    def __init__(self, directory: str, run: str) -> None:
        self.group = copy_group()
        self.memory, self.hosts = join(directory, run, next(_numbers), self.group)
        self.stalls: list[float] = []
        self._arena = Arena()
        self._pending: PendingSave | None = None
        self._error: NnxError | None = None
        self._has_copied = self._is_finished = False
        atexit.register(self.close)

    def find(self) -> tuple[Found | None, list[str]]:
        """Restore the newest usable copy on every host; see `nnx_checkpoint.memory.finding.find`."""
        return find(self.memory, self.hosts, self.group)

    def keep(self, found: Found | None) -> None:
        """Remove all copies but the one that this run resumes from."""
        self._has_copied = found is not None
        if self.hosts.leads(rank_and_size(self.group)[0]):
            self.memory.keep_only(None if found is None else found.save_id)

    def copy(self, request: Callable[[str], SaveRequest]) -> None:
        """Begin a copy (after the end of the one before).

        Args:
            request: Function of the path to write to, that returns the state, with the step in the
                provenance. Its tensors may change as soon as this returns.

        Raises:
            CheckpointError: The first copy failed.
        """
        self.wait()
        begun = time.perf_counter()
        made = request(str(self.memory.path))
        copy = MemoryCopy(
            replace(made, collective=self.group is not None), self.group, self.memory, self.hosts
        )
        try:
            copy.capture(self._arena.stage)
        except Exception as error:
            copy.fail(error)
        self._pending = PendingSave(
            str(made.path), lambda: self._complete(copy), collective=self.group is not None
        )
        self.stalls.append(time.perf_counter() - begun)

    def _complete(self, copy: MemoryCopy) -> None:
        """Complete a copy; keep its error for `wait`, as it is no error of training."""
        try:
            copy.complete()
        except NnxError as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the copy in flight.

        A copy that failed costs nothing but time, so its error is only logged, unless it is the first one.

        Raises:
            CheckpointError: The first copy failed, or another rank is gone.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        begun = time.perf_counter()
        pending.wait()
        self.stalls[-1] += time.perf_counter() - begun
        error, self._error = self._error, None
        # An error of gloo is its cause where another rank is gone: not even this step may count as done.
        if error is not None and (not self._has_copied or isinstance(error.__cause__, RuntimeError)):
            raise error
        if error is not None and rank_and_size(self.group)[0] == 0:
            log.warning("memory: %s", error)
        self._has_copied = self._has_copied or error is None

    def finish(self) -> None:
        """Mark the run as finished: it needs its copies until the end of the process, and no longer."""
        self.wait()
        self._arena = Arena()
        self._is_finished = True

    def close(self) -> None:
        """Release the memory; the last process of a finished run on a host removes its copies."""
        atexit.unregister(self.close)
        self._arena = Arena()
        self.memory.close(finished=self._is_finished)
