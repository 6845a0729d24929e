"""Run the processes of a job in actors, and restart from the last checkpoint when one is lost."""

from __future__ import annotations

import logging
import secrets
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
from nnx_ray.actors import EventLog, Outcome
from nnx_ray.cluster import Resources, WorkerGroup, connect, wait_for_nodes
from nnx_ray.options import RayOptions

__all__ = ["RayLauncher"]

log = logging.getLogger("nnx.ray")
_SECONDS_FOR_THE_CAUSE = 6.0
"""Seconds to wait for the original failure after a rank has reported a consequence of it."""


class RankTracebackError(Exception):
    """The traceback of another process, as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _LostError(Exception):
    """A process or a node was lost; the launcher may restart the run."""


class RayLauncher(Launcher):
    """Starts the processes of a run as actors of a Ray cluster.

    Args:
        options: The options of the launcher.
    """

    Options = RayOptions
    options: RayOptions

    def run(self, job: Job) -> Any:
        """Run a job in actors, as `Launcher.run` describes.

        Raises:
            LaunchError: The actors cannot be started, or were lost more than `max_failures` times.
        """
        pickled = _pickled(job.work)
        self._connect(job.nodes, job.devices, job.device_type)
        events, run = _new_event_log(), _new_name()
        for failures in range(self.options.max_failures + 1):
            try:
                return self._attempt(job, pickled, events, run, again=failures > 0)
            except _LostError as lost:
                left = self.options.max_failures - failures
                if not left:
                    raise LaunchError(
                        f"{lost} The run was started {failures + 1} times (max_failures={failures}).",
                        remedy="Find the reason in Ray's logs, and restart from the last checkpoint.",
                    ) from lost
                log.warning("ray: %s Restarting (%d more failures allowed)", lost, left - 1)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, job: Job, pickled: bytes, events: Any, run: str, *, again: bool) -> Any:
        """Start all processes once.

        A loss during a restart counts as a failure like a later loss, and may be followed by another restart.
        """
        size = {"nodes": job.nodes, "devices": job.devices}
        if again:
            wait_for_nodes(self.options.start_timeout)
        try:
            group = WorkerGroup(self.options, **size, device_type=job.device_type, packages=job.packages)
        except LaunchError as error:
            if again and isinstance(error.__cause__, RayError):
                raise _LostError(str(error)) from error
            raise
        try:
            log.info("ray: %s", group)
            resume_from = self._resume_from(group, events) if again else None
            return _work(group, ray.put(pickled), resume_from, events, run)
        except RayError as error:
            raise _LostError(f"a process was lost at its start: {_first_line(error)}") from error
        finally:
            group.end()

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run a command in actors, and end all of them when one fails.

        Args:
            command: The program and its arguments.
            nodes: The number of nodes.
            devices: The number of processes on each node.

        Returns:
            The exit code of the first command that failed, or 0.
        """
        self._connect(nodes, devices, "cpu")
        group = WorkerGroup(self.options, nodes=nodes, devices=devices, device_type="cpu", packages=())
        try:
            pairs = zip(group.workers, group.environments(_new_name()), strict=True)
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
                        "ray: rank %d on %s ended with exit code %d", rank, group.infos[rank].node, code
                    )
                    return code if code > 0 else 1
            return 0
        except RayError as error:
            raise LaunchError(f"a process was lost: {error}", remedy="Check Ray's logs.") from error
        finally:
            group.end()

    def _connect(self, nodes: int, devices: int, device_type: str) -> None:
        needed = Resources(self.options, device_type).of(nodes * devices)
        connect(self.options, cpus=needed.get("CPU", 0))

    def _resume_from(self, group: WorkerGroup, events: Any) -> str | None:
        """Return the last checkpoint that was committed since the run began."""
        saves = [text for _, kind, text in ray.get(events.read.remote()) if kind == "save"]
        found = group.last_committed(saves)
        if found is None:
            log.warning("ray: restarting from the beginning (no checkpoint was saved)")
            return None
        log.warning("ray: resuming after step %d, from %s", found[1], found[0])
        return found[0]


def _work(group: WorkerGroup, pickled: Any, resume_from: str | None, events: Any, run: str) -> Any:
    """Run every worker, and return rank zero's result."""
    folder, ranks = str(Path.cwd()), {}
    for rank, (worker, mine) in enumerate(zip(group.workers, group.environments(run), strict=True)):
        report = _Reporter(events, rank)
        ranks[worker.work.remote(pickled, mine, folder, report, resume_from)] = rank
    log.debug("sent")
    ended: dict[int, Outcome | RayError] = {}
    deadline = float("inf")
    while ranks and time.monotonic() < deadline:
        ready, _ = ray.wait(list(ranks), num_returns=1, timeout=1.0)
        for ref in ready:
            rank = ranks.pop(ref)
            ended[rank] = _outcome(ref)
        if deadline == float("inf") and any(map(_has_failed, ended.values())):
            deadline = time.monotonic() + _SECONDS_FOR_THE_CAUSE
        if any(map(_is_cause, ended.values())):
            break
    failed = {rank: each for rank, each in ended.items() if _has_failed(each)}
    if failed:
        _raise_first(
            failed, group, [rank for rank, kind, _ in ray.get(events.read.remote()) if kind == "failed"]
        )
    result = ended[0]
    assert isinstance(result, Outcome)
    return result.result


def _raise_first(failed: dict[int, Outcome | RayError], group: WorkerGroup, order: list[int]) -> None:
    """Raise the first failure that is not a consequence of another one.

    Args:
        failed: The outcome of each rank that failed.
        group: The workers.
        order: The ranks that reported an exception, in order.
    """
    failed_in_order = sorted(failed, key=lambda rank: order.index(rank) if rank in order else len(order))
    causes = [rank for rank in failed_in_order if _is_cause(failed[rank])]
    for rank in causes or failed_in_order[:1]:
        each = failed[rank]
        where = f"rank {rank} on {group.infos[rank].node}"
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


def _outcome(ref: Any) -> Outcome | RayError:
    try:
        found: Outcome = ray.get(ref)
    except RayError as error:
        return error
    return found


def _has_failed(ended: Outcome | RayError) -> bool:
    return isinstance(ended, RayError) or bool(ended.text)


def _is_cause(ended: Outcome | RayError) -> bool:
    """Return True if an outcome is the cause of the run's failure, not a consequence."""
    return isinstance(ended, RayError) or (bool(ended.text) and not ended.follows_lost_rank)


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") + "." if lines else f"{type(error).__name__}."


class _Reporter:
    """Appends one rank's events to the event log, and waits until they are stored."""

    def __init__(self, events: Any, rank: int) -> None:
        self.events, self.rank = events, rank

    def __call__(self, kind: str, text: str) -> None:
        ray.get(self.events.report.remote(self.rank, kind, text))


def _new_name() -> str:
    """Return a name for a run, which its restarts keep."""
    return f"ray-{secrets.token_hex(8)}"


def _new_event_log() -> Any:
    """Create an event log on the driver's node, which lives as long as the run."""
    # With a soft affinity Ray puts an actor without resources on any node, and the log would die with it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(EventLog).options(num_cpus=0, scheduling_strategy=here).remote()


def _pickled(work: Work) -> bytes:
    """Return the pickled work, the same for every worker.

    Raises:
        LaunchError: The work cannot be pickled. The error names the smallest culprit that can be found.
    """
    try:
        pickled: bytes = cloudpickle.dumps(work)
    except Exception as error:  # user objects may raise anything
        raise LaunchError(
            f"the run cannot be sent to other processes: {_culprit(work)} cannot be pickled "
            f"({type(error).__name__}: {error}).",
            remedy="Create it in `setup` or `configure_model`, which run in each process, or drop it in "
            "`__getstate__`.",
        ) from error
    return pickled


def _culprit(work: Work) -> str:
    for name, value in work.parts():
        try:
            cloudpickle.dumps(value)
        except Exception:  # user objects may raise anything
            return f"{name}, a {type(value).__name__},"
    return "one of its objects"
