"""Define checks: a promise of a strategy, the function that tests it, and the bench for the function.

`nnx_conformance.checks` has the checks themselves, and `runner` runs them.
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
    "NumbersDiffer",
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
    "numbers.optimizers",
    "numbers.losses",
    "converges",
    "stages",
    "models.layers",
    "models.building",
    "lightning_api.user_module",
    "lightning_api.callbacks",
    "lightning_api.collectives",
    "lightning_api.samplers",
    "user_patterns.rank_dependent",
    "user_patterns.gradients",
    "user_patterns.parameters",
    "user_patterns.state_dicts",
    "user_patterns.hand_written_steps",
    "user_patterns.writes_per_rank",
    "user_patterns.backward",
    "user_patterns.optimizers",
    "user_patterns.one_rank_only",
    "user_patterns.torch_distributed",
    "checkpoints.resuming",
    "checkpoints.contents",
    "checkpoints.corruption",
    "nodes",
    "lifecycle.plugin_spec",
    "lifecycle.launch",
    "lifecycle.fabric",
    "lifecycle.errors",
    "lifecycle.first_error",
    "lifecycle.reuse",
    "lifecycle.cleanup",
)
"""The modules of checks, in running order: an early failure often explains later ones."""

GROUPS = tuple(dict.fromkeys(module.partition(".")[0] for module in MODULES))
"""The groups in running order."""

DEADLINE = 60.0
"""Seconds after which a check counts as hung."""


class CheckFailed(NnxError):  # noqa: N818 - a verdict, not an accident
    """The strategy breaks the promise; the message has the observed and the expected result."""


class NumbersDiffer(CheckFailed):
    """Losses or weights differ from those of one process; a strategy with ``exact=False`` may do that."""


class NotApplicable(NnxError):  # noqa: N818
    """The check does not apply to this strategy; the message has the reason."""


class Refused(NnxError):  # noqa: N818
    """The strategy refuses the user pattern, with a remedy on every rank; the message is the refusal."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise.

    Attributes:
        name: A unique name in snake case, for reports and `--only`.
        group: The folder or module in `checks`; one of `GROUPS`.
        promise: The promise of the strategy, in one sentence.
        run: The test function; raises `CheckFailed` or `NotApplicable`.
        requires: Capabilities that the promise needs: ``"clip_by_norm"`` for a flag,
            ``"precisions:bf16-mixed"`` for an entry of a list.
        kinds: The kinds of strategies that the check applies to.
        full: True if only the full profile runs the check.
        of_adapter: True if the check tests code of Lightning or the adapter, equal for every engine. The
            tests of this repository run it on one strategy of each adapter; `nnx conformance` always runs it.
        refusable: True if a strategy may name the check in `Capabilities.refuses`.
        deadline: Seconds after which the check counts as hung.
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

    @property
    def module(self) -> str:
        """The entry of `MODULES` that has the check, such as ``"user_patterns.gradients"``."""
        return _module_of(self.run)


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
    """Register a function as a check; the first line of its docstring is the promise.

    Args:
        *requires: See `Check`.
        name: Replaces the function's name, for functions made in a loop.
        kinds: See `Check`.
        full: See `Check`.
        of_adapter: See `Check`.
        refusable: See `Check`.
        deadline: See `Check`.
    """

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        made = Check(
            name=name or function.__name__,
            group=_module_of(function).partition(".")[0],
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
            raise ValueError(f"check {made.name!r} has a second definition or no docstring: in {where}")
        for requirement in requires:
            missing_capability(Capabilities(), requirement)
        _CHECKS[made.name] = made
        return function

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Return every check, by module and then in the order of definition."""
    for module in MODULES:
        importlib.import_module(f"nnx_conformance.checks.{module}")
    # The order of imports may differ: a test may have imported a later module for its models.
    return tuple(sorted(_CHECKS.values(), key=lambda one: MODULES.index(one.module)))


def _module_of(function: Callable[[Bench], None]) -> str:
    """Return a check's entry of `MODULES`."""
    return function.__module__.partition(".checks.")[2]


def missing_capability(capabilities: Capabilities, requirement: str) -> str:
    """Return the declaration that fails a requirement; empty if the requirement is met.

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


def expect(condition: bool, message: str, *, of_numbers: bool = False) -> None:
    """Fail the check unless the condition holds.

    Args:
        condition: The promised condition.
        message: The observed and the expected result.
        of_numbers: True if the condition compares numbers with those of one process.

    Raises:
        CheckFailed: The condition does not hold.
    """
    if not condition:
        raise (NumbersDiffer if of_numbers else CheckFailed)(message)


class Reference:
    """Results to compute once: those of one plain process, and those that several checks read.

    Args:
        pool: The workers.

    Attributes:
        shared: Results or failures of `Bench.run_once`, by strategy, job and arguments.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._results: dict[Any, Any] = {}
        self.shared: dict[Any, list[Any] | CheckFailed] = {}

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        """Call ``job(REFERENCE, *args)`` on one worker, or return the earlier result."""
        key = (job.__module__, job.__qualname__, repr(args))
        if key not in self._results:
            self._results[key] = self._pool.run(_in_worker, job, REFERENCE, args, world_size=1)[0]
        return self._results[key]


class Bench:
    """The tools of one check.

    Attributes:
        subject: The strategy.
        identity: The class behind the strategy, and its declarations.
        directory: An empty directory for this check.
        full: True to test at every world size.
        ranks: Largest number of ranks for the strategy.
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
        """World sizes for comparisons: two, and three in the full profile; or one."""
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
            *args: Its further arguments; arguments and results are pickled.
            world_size: Number of ranks; by default two, or one if `ranks` is one.
            nodes: Number of simulated nodes.
            subject: A strategy in place of the one under test, such as ``Subject("ddp")``.
            timeout: Seconds after which the job counts as hung; by default the remaining time of the check.
            end_after: See `WorkerPool.run`.

        Returns:
            The results in rank order.

        Raises:
            CheckFailed: A rank raised, died or hung; the message names the rank and the error.
            NotApplicable: The job needs more ranks than there are.
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

    def require_ranks(self, count: int) -> None:
        """End the check if the strategy runs on fewer ranks."""
        if count > self.ranks:
            self.not_applicable(f"the check needs {count} ranks, and there are {self.ranks}")

    def _ranks(self, asked: int | None) -> int:
        self.require_ranks(asked or 1)
        return asked or min(2, self.ranks)

    def run_once(
        self,
        job: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
        end_after: float = math.inf,
    ) -> list[Any]:
        """Call a job once for all checks that read its results; see `run`.

        Args:
            job: See `run`.
            *args: See `run`; they need faithful reprs.
            world_size: See `run`.
            timeout: See `run`.
            end_after: See `run`.

        Returns:
            The results in rank order; checks must not change them.

        Raises:
            CheckFailed: The job failed, in this check or an earlier one.
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
        """Return the result of ``job(REFERENCE, *args)`` on one plain process; computed once."""
        return self._reference.run(job, *args)

    def train(self, task: Task, *, world_size: int | None = None) -> list[Outcome]:
        """Train a task; see `nnx_conformance.training.fit`."""
        return self.run(fit, task, world_size=world_size)

    def train_alone(self, task: Task) -> Outcome:
        """Train a task on one plain process; computed once."""
        outcome: Outcome = self.alone(fit, task)
        return outcome

    def not_applicable(self, reason: str) -> NoReturn:
        """End the check, because it does not apply to this strategy."""
        raise NotApplicable(reason)


def _in_worker(job: Callable[..., Any], subject: Subject, args: tuple[Any, ...]) -> Any:
    subject.prepare()
    return job(subject, *args)


def summary_of(subject: Subject, error: JobError) -> str:
    """Return one line with the distinct failures and their ranks, without tracebacks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in error.failures.items():
        ranks.setdefault(exception_in(text), []).append(rank)
    failures = [
        f"{'ranks' if len(where) > 1 else 'rank'} {', '.join(map(str, where))} of {len(error.output)}: {text}"
        for text, where in ranks.items()
    ]
    return f"{subject.strategy}: " + "; ".join(failures)


def exception_in(traceback: str) -> str:
    r"""Return the exception that ends a formatted traceback, on one line; other text unchanged.

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
