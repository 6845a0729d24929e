"""What a check is: one promise of a strategy, the function that tries it, and the bench it tries it on.

The checks themselves are in `nnx_conformance.checks`. Nothing here runs one (see `runner`).
"""

from __future__ import annotations

import importlib
import math
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from nnx_conformance.pool import JobError, WorkerPool
from nnx_conformance.subject import REFERENCE, Identity, Kind, Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import fit
from nnx_core.errors import NnxError
from nnx_core.names.spec import Capabilities

__all__ = [
    "Bench",
    "Check",
    "CheckFailed",
    "GROUPS",
    "NotApplicable",
    "Reference",
    "Refused",
    "all_checks",
    "check",
    "exception_in",
    "expect",
    "missing_capability",
    "summary_of",
]


MODULES = (
    "numbers_optimizers",
    "numbers_losses",
    "stages",
    "structure_layers",
    "structure_building",
    "names_module",
    "names_callbacks",
    "names_collectives",
    "names_samplers",
    "habits_ranks",
    "habits_gradients",
    "habits_parameters",
    "habits_state_dict",
    "habits_weights_by_hand",
    "habits_written_by_ranks",
    "habits_backward",
    "habits_optimizers",
    "habits_lone_rank",
    "habits_collectives",
    "checkpoints_resuming",
    "checkpoints_contents",
    "checkpoints_accidents",
    "nodes",
    "manners_starting",
    "manners_failures",
    "manners_first_error",
    "manners_residue",
)
"""The modules in the order in which their checks run: what fails first explains most."""

GROUPS = tuple(dict.fromkeys(module.partition("_")[0] for module in MODULES))
"""The groups in the order in which they run."""

DEADLINE = 60.0
"""Seconds that a check may take before it counts as hung."""


class CheckFailed(NnxError):  # noqa: N818 - a verdict, not an accident
    """The strategy does not keep the promise; the message says what was seen and what was expected."""


class NotApplicable(NnxError):  # noqa: N818
    """The check has nothing to try on this strategy; the message says why."""


class Refused(NnxError):  # noqa: N818
    """The strategy refuses what the check tries, on every rank and with a remedy; the message is its own."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise.

    Attributes:
        name: Unique, lower snake case; the name under which it is reported and chosen.
        group: The first word of its module's name; one of `GROUPS`.
        promise: The promise of the strategy, in one sentence.
        run: Tries it; raises `CheckFailed` or `NotApplicable`.
        requires: Capabilities without which the promise is not made: ``"clip_by_norm"`` for a flag,
            ``"precisions:bf16-mixed"`` for an entry of a list.
        kinds: The kinds of strategies that the promise can be asked of.
        full: Only tried in the full profile.
        of_adapter: True if it tries Lightning's code or the adapter's, which is the same under every engine.
            The suite of this repository tries it on one strategy of each adapter; `nnx conformance` always.
        refusable: True if a strategy may name the check in `Capabilities.refuses`.
        deadline: Seconds after which it counts as hung.
    """

    name: str
    group: str
    promise: str
    run: Callable[[Bench], None]
    requires: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ("backend", "strategy", "lightning")
    full: bool = False
    of_adapter: bool = False
    refusable: bool = False
    deadline: float = DEADLINE


_CHECKS: dict[str, Check] = {}


def check(
    *requires: str,
    name: str = "",
    kinds: tuple[Kind, ...] = ("backend", "strategy", "lightning"),
    full: bool = False,
    of_adapter: bool = False,
    refusable: bool = False,
    deadline: float = DEADLINE,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a check; its name and the first line of its docstring are the check's.

    Args:
        *requires: See `Check`.
        name: Instead of the function's name, for functions made in a loop.
        kinds: See `Check`.
        full: See `Check`.
        of_adapter: See `Check`.
        refusable: See `Check`.
        deadline: See `Check`.
    """

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        made = Check(
            name=name or function.__name__,
            group=function.__module__.partition(".checks.")[2].partition("_")[0],
            promise=(function.__doc__ or "").strip().partition("\n")[0],
            run=function,
            requires=requires,
            kinds=kinds,
            full=full,
            of_adapter=of_adapter,
            refusable=refusable,
            deadline=deadline,
        )
        if made.name in _CHECKS or not made.promise:
            where = " and in ".join(one.run.__module__ for one in (_CHECKS.get(made.name), made) if one)
            raise ValueError(f"check {made.name!r} is defined twice or has no docstring: in {where}")
        for requirement in requires:
            missing_capability(Capabilities(), requirement)
        _CHECKS[made.name] = made
        return function

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, by module and then in the order of definition."""
    for module in MODULES:
        importlib.import_module(f"nnx_conformance.checks.{module}")
    # Whatever was imported first: a test may have needed a model of a later module.
    return tuple(sorted(_CHECKS.values(), key=lambda one: MODULES.index(one.run.__module__.split(".")[-1])))


def missing_capability(capabilities: Capabilities, requirement: str) -> str:
    """How the declaration says that a requirement is not met; empty where it is.

    Example:
        >>> missing_capability(Capabilities(fabric=False), "fabric")
        'fabric=False'
        >>> missing_capability(Capabilities(), "precisions:bf16-mixed")
        "precisions without 'bf16-mixed'"
        >>> missing_capability(Capabilities(), "clip_by_norm")
        ''
    """
    flag, _, entry = requirement.partition(":")
    if flag not in {field.name for field in fields(Capabilities)}:
        raise ValueError(f"{flag!r} is not a capability")
    value = getattr(capabilities, flag)
    if entry:
        return "" if entry in value else f"{flag} without {entry!r}"
    return "" if value else f"{flag}=False"


def expect(condition: bool, message: str) -> None:
    """Fail the check unless the condition holds.

    Args:
        condition: The condition that was promised.
        message: Says what was seen and what was expected.

    Raises:
        CheckFailed: It does not hold.
    """
    if not condition:
        raise CheckFailed(message)


class Reference:
    """Results that are computed once: of one plain process, for all strategies, and what checks share.

    Args:
        pool: The workers.

    Attributes:
        shared: Results of `Bench.run_once`, or how it failed, by what was run.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._results: dict[Any, Any] = {}
        self.shared: dict[Any, list[Any] | CheckFailed] = {}

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        """Call ``job(REFERENCE, *args)`` on one worker, unless that was done before."""
        key = (job.__module__, job.__qualname__, repr(args))
        if key not in self._results:
            self._results[key] = self._pool.run(_in_worker, job, REFERENCE, args, world_size=1)[0]
        return self._results[key]


class Bench:
    """One check's tools.

    Attributes:
        subject: The strategy.
        identity: The class that stands behind it, and what it declares.
        directory: An empty directory of this check's own.
        full: True if everything is to be tried, at every world size.
        ranks: The most ranks that the strategy under test can run on.
    """

    def __init__(
        self,
        subject: Subject,
        identity: Identity,
        *,
        pool: WorkerPool,
        reference: Reference,
        directory: Path,
        full: bool = False,
        ranks: int = 3,
        deadline: float = 60.0,
    ) -> None:
        self.subject = subject
        self.identity = identity
        self.directory = directory
        self.full = full
        self.ranks = ranks
        self._pool = pool
        self._reference = reference
        self._end = time.monotonic() + deadline

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Where numbers are compared: two ranks, and three if everything is tried; or one."""
        if self.ranks == 1:
            return (1,)
        return (2, 3) if self.full and self.ranks > 2 else (2,)

    @property
    def remaining(self) -> float:
        """Seconds until the check counts as hung."""
        return max(1.0, self._end - time.monotonic())

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        nodes: int = 1,
        subject: Subject | None = None,
        timeout: float | None = None,
        end_after: float = math.inf,
    ) -> list[Any]:
        """Call ``job(subject, *args)`` once per rank, in warm workers.

        Args:
            job: A function of a module that the workers can import.
            *args: Its further arguments; they travel by pickle, as the results do.
            world_size: Ranks; two by default, or one where the strategy is tried on one.
            nodes: The number of nodes that the ranks are told to be on.
            subject: Another strategy than the one under test, such as ``Subject("ddp")``.
            timeout: Seconds after which the job counts as hung; by default what the check has left.
            end_after: See `WorkerPool.run`.

        Returns:
            The results in rank order.

        Raises:
            CheckFailed: A rank raised, died or did not answer in time; the message says which, and how.
            NotApplicable: It asks for several ranks where the strategy is tried on one.
        """
        chosen, ranks = subject or self.subject, self._ranks(world_size)
        try:
            limit = min(self.remaining, timeout or self.remaining)
            return self._pool.run(
                *(_in_worker, job, chosen, args),
                world_size=ranks,
                nodes=nodes,
                timeout=limit,
                end_after=end_after,
            )
        except JobError as error:
            raise CheckFailed(summary_of(chosen, error)) from error

    def _ranks(self, asked: int | None) -> int:
        if asked is not None and asked > self.ranks:
            self.not_applicable(f"it takes {asked} ranks, and there are {self.ranks}")
        return asked or min(2, self.ranks)

    def run_once(
        self,
        job: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
        end_after: float = math.inf,
    ) -> list[Any]:
        """Like `run`, for what several checks look at: only the first of them runs it.

        Args:
            job: See `run`.
            *args: See `run`; they need faithful reprs.
            world_size: See `run`.
            timeout: See `run`.
            end_after: See `run`.

        Returns:
            The results in rank order, which the check must not change.

        Raises:
            CheckFailed: Raised as by `run`, for every check that asks.
        """
        shared, key = self._reference.shared, (self.subject, job, repr(args), self._ranks(world_size))
        if key not in shared:
            try:
                shared[key] = self.run(
                    job, *args, world_size=world_size, timeout=timeout, end_after=end_after
                )
            except CheckFailed as failure:
                shared[key] = failure
        found = shared[key]
        if isinstance(found, CheckFailed):
            raise found
        return found

    def alone(self, job: Callable[..., Any], *args: Any) -> Any:
        """The result of ``job(REFERENCE, *args)`` on one plain process; computed once."""
        return self._reference.run(job, *args)

    def train(self, task: Task, *, world_size: int | None = None) -> list[Outcome]:
        """Train a task; see `nnx_conformance.training.fit`."""
        return self.run(fit, task, world_size=world_size)

    def train_alone(self, task: Task) -> Outcome:
        """Train a task on one plain process; computed once."""
        outcome: Outcome = self.alone(fit, task)
        return outcome

    def not_applicable(self, reason: str) -> NoReturn:
        """End the check: there is nothing to try on this strategy."""
        raise NotApplicable(reason)


def _in_worker(job: Callable[..., Any], subject: Subject, args: tuple[Any, ...]) -> Any:
    subject.prepare()
    return job(subject, *args)


def summary_of(subject: Subject, error: JobError) -> str:
    """One line for each way in which ranks failed: the exception without its traceback, or how it died."""
    ranks: dict[str, list[int]] = {}
    for rank, text in error.failures.items():
        ranks.setdefault(exception_in(text), []).append(rank)
    parts = [
        f"{'ranks' if len(where) > 1 else 'rank'} {', '.join(map(str, where))} of {len(error.output)}: {what}"
        for what, where in ranks.items()
    ]
    return f"{subject.strategy}: " + "; ".join(parts)


def exception_in(traceback: str) -> str:
    r"""What a formatted traceback ends with, on one line; other text as it is.

    Example:
        >>> exception_in('  File "x.py", line 1, in f\n    g()\nKeyError: two\n\tlines')
        'KeyError: two lines'
    """
    lines = traceback.rstrip().split("\n")
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    end = frames[-1] + 1 if frames else 0
    while frames and lines[end].startswith("    ") and end < len(lines) - 1:
        end += 1  # the frame's source line, and the marks below it
    return textwrap.shorten(" ".join(lines[end:]), 600, placeholder=" ...")
