"""`RayLauncher`: a run in actors, started again from its last checkpoint when one of them is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nnx_core.errors import LaunchError
from nnx_core.launch.launcher import Job, Launcher, Work
from nnx_ray.actors import Ended, Journal
from nnx_ray.cluster import Crew, Resources, connect, wait_for_nodes
from nnx_ray.options import RayOptions

__all__ = ["RayLauncher"]

log = logging.getLogger("nnx.ray")
_TIME_FOR_THE_CAUSE = 6.0
"""Seconds in which the loss that others only noticed must become known."""


class RankTracebackError(Exception):
    """The traceback of another process, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _LostError(Exception):
    """A process or a node is gone; the run may be started again."""


class RayLauncher(Launcher):
    """Starts the processes of a run as actors of a Ray cluster.

    Args:
        options: Its options.
    """

    Options = RayOptions
    options: RayOptions

    def run(self, job: Job) -> Any:
        """Do a job's work in actors; see `Launcher.run`.

        Raises:
            LaunchError: The actors cannot be started, or were lost once too often.
        """
        pickled = _pickled(job.work)
        self._connect(job.nodes, job.devices, job.device_type)
        journal = _new_journal()
        for failures in range(self.options.max_failures + 1):
            try:
                return self._attempt(job, pickled, journal, again=failures > 0)
            except _LostError as lost:
                left = self.options.max_failures - failures
                if not left:
                    raise LaunchError(
                        f"{lost} The run was started {failures + 1} times (max_failures={failures}).",
                        remedy="Look for the reason in Ray's logs, and start again from the last checkpoint.",
                    ) from lost
                log.warning("ray: %s Starting again; %d more failures are accepted.", lost, left - 1)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, job: Job, pickled: bytes, journal: Any, *, again: bool) -> Any:
        """Start all processes once. What is lost while they start again is lost as it is later."""
        size = {"nodes": job.nodes, "devices": job.devices}
        if again:
            wait_for_nodes(self.options.start_timeout)
        try:
            crew = Crew(self.options, **size, device_type=job.device_type, packages=job.packages)
        except LaunchError as error:
            if again and isinstance(error.__cause__, RayError):
                raise _LostError(str(error)) from error
            raise
        try:
            log.info("ray: %s", crew)
            resume_from = self._resume_from(crew, journal) if again else None
            return _work(crew, ray.put(pickled), resume_from, journal)
        except RayError as error:
            raise _LostError(f"a process was lost as it began: {_first_line(error)}") from error
        finally:
            crew.end()

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run a command in actors; when one fails, the others are ended.

        Args:
            command: The program and its arguments.
            nodes: The number of nodes.
            devices: The number of processes on each node.

        Returns:
            The exit code of the first that failed, or 0.
        """
        self._connect(nodes, devices, "cpu")
        crew = Crew(self.options, nodes=nodes, devices=devices, device_type="cpu", packages=())
        try:
            pairs = zip(crew.workers, crew.environments(), strict=True)
            folder = str(Path.cwd())
            ranks = {
                worker.command.remote(list(command), mine, folder): rank
                for rank, (worker, mine) in enumerate(pairs)
            }
            while ranks:
                (first, *_), _ = ray.wait(list(ranks), num_returns=1)
                rank = ranks.pop(first)
                code = int(ray.get(first))
                if code:
                    log.error(
                        "ray: rank %d on %s ended with exit code %d", rank, crew.places[rank].node, code
                    )
                    return code if code > 0 else 1
            return 0
        except RayError as error:
            raise LaunchError(f"a process was lost: {error}", remedy="Look at Ray's logs.") from error
        finally:
            crew.end()

    def _connect(self, nodes: int, devices: int, device_type: str) -> None:
        needed = Resources(self.options, device_type).of(nodes * devices)
        connect(self.options, cpus=needed.get("CPU", 0))

    def _resume_from(self, crew: Crew, journal: Any) -> str | None:
        """The last checkpoint that was committed since the run began."""
        saves = [text for _, kind, text in ray.get(journal.read.remote()) if kind == "save"]
        found = crew.last_committed(saves)
        if found is None:
            log.warning("ray: nothing was saved yet, so that the run begins anew.")
            return None
        log.warning("ray: resuming after step %d, from %s", found[1], found[0])
        return found[0]


def _work(crew: Crew, pickled: Any, resume_from: str | None, journal: Any) -> Any:
    """Let every worker do its part, and return what rank 0 brings back."""
    folder, ranks = str(Path.cwd()), {}
    for rank, (worker, mine) in enumerate(zip(crew.workers, crew.environments(), strict=True)):
        tell = _Teller(journal, rank)
        ranks[worker.work.remote(pickled, mine, folder, tell, resume_from)] = rank
    log.debug("sent")
    ended: dict[int, Ended | RayError] = {}
    deadline = float("inf")
    while ranks and time.monotonic() < deadline:
        ready, _ = ray.wait(list(ranks), num_returns=1, timeout=1.0)
        for ref in ready:
            rank = ranks.pop(ref)
            ended[rank] = _outcome(ref)
        if deadline == float("inf") and any(map(_has_failed, ended.values())):
            deadline = time.monotonic() + _TIME_FOR_THE_CAUSE
        if any(map(_is_cause, ended.values())):
            break
    failed = {rank: each for rank, each in ended.items() if _has_failed(each)}
    if failed:
        _raise_first(
            failed, crew, [rank for rank, kind, _ in ray.get(journal.read.remote()) if kind == "failed"]
        )
    result = ended[0]
    assert isinstance(result, Ended)
    return result.result


def _raise_first(failed: dict[int, Ended | RayError], crew: Crew, order: list[int]) -> None:
    """Raise what failed first and is no consequence of something else.

    Args:
        failed: The outcome of each rank that failed.
        crew: The workers.
        order: The ranks that told of an exception, the first one first.
    """
    told = sorted(failed, key=lambda rank: order.index(rank) if rank in order else len(order))
    causes = [rank for rank in told if _is_cause(failed[rank])]
    for rank in causes or told[:1]:
        each = failed[rank]
        where = f"rank {rank} on {crew.places[rank].node}"
        if isinstance(each, RayError):
            raise _LostError(f"{where} is lost: {_first_line(each)}") from each
        if not causes:
            raise _LostError(
                f"{where} lost another rank, whose process or node is gone."
            ) from RankTracebackError(each.text)
        cause = RankTracebackError(f"{where}:\n{each.text}")
        if each.error:
            raise cloudpickle.loads(each.error) from cause
        last = each.text.strip().splitlines()[-1]
        raise LaunchError(f"{where} failed: {last}", remedy="Its traceback is above.") from cause


def _outcome(ref: Any) -> Ended | RayError:
    try:
        found: Ended = ray.get(ref)
    except RayError as error:
        return error
    return found


def _has_failed(ended: Ended | RayError) -> bool:
    return isinstance(ended, RayError) or bool(ended.text)


def _is_cause(ended: Ended | RayError) -> bool:
    """Return True if this is why a run failed, and not what others made of it."""
    return isinstance(ended, RayError) or (bool(ended.text) and not ended.follows_lost_rank)


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") + "." if lines else f"{type(error).__name__}."


class _Teller:
    """Writes one rank's entries into the journal, and waits until they are there."""

    def __init__(self, journal: Any, rank: int) -> None:
        self.journal, self.rank = journal, rank

    def __call__(self, kind: str, text: str) -> None:
        ray.get(self.journal.tell.remote(self.rank, kind, text))


def _new_journal() -> Any:
    """A journal on the node of this process, which is there as long as the run has somebody to tell."""
    # A soft affinity puts an actor that reserves nothing on any node, with which it would be lost.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Journal).options(num_cpus=0, scheduling_strategy=here).remote()


def _pickled(work: Work) -> bytes:
    """The work as bytes, for every worker the same.

    Raises:
        LaunchError: A part of it cannot be pickled; the smallest that can be found is named.
    """
    try:
        pickled: bytes = cloudpickle.dumps(work)
    except Exception as error:  # whatever the user's objects raise
        raise LaunchError(
            f"the run cannot be sent to other processes: {_culprit(work)} cannot be pickled "
            f"({type(error).__name__}: {error}).",
            remedy="Make it in `setup` or `configure_model`, which run in each process, or leave it out in "
            "`__getstate__`.",
        ) from error
    return pickled


def _culprit(work: Work) -> str:
    for name, part in work.parts():
        try:
            cloudpickle.dumps(part)
        except Exception:  # as above
            return f"{name}, a {type(part).__name__},"
    return "something in it"
