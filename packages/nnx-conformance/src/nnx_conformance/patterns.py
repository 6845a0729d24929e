"""User patterns: modules with common user code, and the functions that try a strategy on them.

A strategy gives the numbers of one process, or refuses on every rank with an `NnxError` that has a remedy.
Every other end fails: different numbers, an error of torch or gloo, a dead process, a hang. In some patterns
the ranks run different code. Then one rank may refuse alone, and its end must release the others.

"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from nnx_conformance.check import Bench, CheckFailed, NumbersDiffer, Refused, check, expect
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import fit
from nnx_core.errors import NnxError

__all__ = ["Attempt", "UserPattern", "ManualPattern", "attempt", "shared_job", "try_pattern"]

TOLERANCE = 2e-5
"""Largest difference of losses, weights and observed values, all of which are near one."""
PROMPT = 30.0
"""Seconds after which a refusal counts as a hang."""
END_AFTER = 5.0
"""Seconds from an error to the end of that rank's process, if other ranks continue (as in a script)."""

_FOREIGN = re.compile(r"\b(?!Unsupported|Nnx|Option|Plan)[A-Z]\w*(Error|Exception|EnforceNotMet)\b: ")
_CUT_OFF = re.compile(r"Connection (was likely )?(closed|reset)|Broken pipe|failed to recv|Socket closed")
Module = TypeVar("Module", bound="type[UserPattern]")


class UserPattern(Plain):
    """The plain module, which records the values that its own code observes.

    Attributes:
        ranks_differ: True if ranks run different code, so that perhaps only one rank can refuse.
        seen: The values that hooks and steps observed, in order.

    """

    ranks_differ: ClassVar[bool] = False
    seen: list[float]

    def __init__(self, task: Task) -> None:
        self.__dict__["seen"] = []
        super().__init__(task)

    @property
    def up(self) -> Any:
        """Return the larger layer of the first block."""
        block: Any = self.blocks[0]
        return block.up

    def observe(self, *values: Any) -> None:
        """Record values."""
        self.seen.extend(float(value) for value in values)


class ManualPattern(UserPattern):
    """A user pattern with manual optimization."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def recorded_loss(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of one batch, after recording it."""
        loss = self.loss(batch)
        self.record(loss)
        return loss


@dataclass(frozen=True)
class Attempt:
    """The end of a run on one rank.

    Attributes:
        losses: Mean loss over all ranks of every training batch, until the run ended.
        seen: The values that user code observed.
        seconds: The duration.
        outcome: The outcome; None if the run ended with an error.
        error: The type, text and remedy of the error.
        refused: True if the error is an `NnxError` with a remedy.
        cut_off: True if the error comes from a collective whose other rank has ended.

    """

    losses: list[float]
    seen: list[float]
    seconds: float
    outcome: Outcome | None = None
    error: str = ""
    refused: bool = False
    cut_off: bool = False


def shared_job() -> Callable[..., Callable[[Module], Module]]:
    """Return a decorator that makes a check of each decorated class; all its patterns share one job.

    A check has the class's name in snake case; its promise is the first line of the class's docstring.
    Arguments of the decorator are capabilities that the check requires; keyword arguments set fields of the
    task.

    """
    tasks: dict[str, Task] = {}

    def pattern(*requires: str, **changes: Any) -> Callable[[Module], Module]:
        def register(module: Module) -> Module:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", module.__name__).lower()
            tasks[name] = Task(model=module, **{"steps": 4, **changes})

            def run(bench: Bench) -> None:
                for world_size in bench.world_sizes:
                    try_pattern(bench, tasks, name, world_size)

            run.__doc__, run.__module__ = module.__doc__, module.__module__
            is_manual = issubclass(module, ManualPattern)
            needed = (*requires, *(["manual_optimization"] if is_manual else []))
            check(*needed, name=name, kinds=("backend", "strategy"), refusable=True, deadline=240.0)(run)
            return module

        return register

    return pattern


def try_pattern(bench: Bench, tasks: dict[str, Task], name: str, world_size: int) -> None:
    """Compare the attempts of all ranks with one process.

    Args:
        bench: The check's tools.
        tasks: The tasks that share a job.
        name: The pattern to compare.
        world_size: Number of ranks.

    Raises:
        Refused: Every rank refused in time, with a remedy, and had the losses of one process until then.
            If the ranks differ, one refusal suffices, and the others may fail as its consequence.
        CheckFailed: The run ended in any other way, or with numbers that differ from one process.

    """
    alone: Attempt = bench.alone(attempt, tuple(tasks.values()))[list(tasks).index(name)]
    expect(not alone.error, f"the reference (one plain process) fails: {alone.error}")
    ranks = _attempts(bench, tasks, name, world_size)
    differ = getattr(tasks[name].model, "ranks_differ", False)
    released = differ and any(seen.refused for seen in ranks)
    for rank, seen in enumerate(ranks):
        where = f"rank {rank} of {len(ranks)}"
        expect(seen.refused or not seen.error or (released and seen.cut_off), f"{where}: {seen.error}")
        started = alone.losses[: len(seen.losses)] if seen.error else alone.losses
        expect_equal_losses(seen.losses, started, tolerance=TOLERANCE, where=where)
        if seen.outcome is not None and alone.outcome is not None:
            expect_equal_weights(
                seen.outcome.weights, alone.outcome.weights, tolerance=TOLERANCE, where=where
            )
            _expect_equal_values(seen.seen, alone.seen, where)
    refusing = [rank for rank, seen in enumerate(ranks) if seen.error]
    if refusing:
        reason = next(seen.error for seen in ranks if seen.refused)
        expect(len(refusing) == len(ranks), f"only ranks {refusing} refused: {reason}")
        slowest = max(seen.seconds for seen in ranks)
        expect(
            slowest < PROMPT, f"the refusal took {slowest:.0f} s, expected less than {PROMPT:.0f}: {reason}"
        )
        raise Refused(reason)


def _attempts(bench: Bench, shared: dict[str, Task], name: str, world_size: int) -> list[Attempt]:
    """Return one pattern's attempts from the shared job; after an error, start a new job for the rest."""
    rest = dict(shared)
    while True:
        try:
            batch, limit = tuple(rest.values()), 20.0 + 2.0 * len(rest)
            ranks = bench.run_once(attempt, batch, world_size=world_size, timeout=limit, end_after=END_AFTER)
        except CheckFailed:
            if len(rest) == 1:
                raise
            rest = {name: shared[name]}
            continue
        done = list(rest)[: min(len(seen) for seen in ranks)]
        if name in done:
            return [seen[done.index(name)] for seen in ranks]
        rest = {key: task for key, task in rest.items() if key not in done}


def attempt(subject: Subject, tasks: Sequence[Task]) -> list[Attempt]:
    """Train the tasks one after the other, until one ends with an error."""
    attempts: list[Attempt] = []
    while len(attempts) < len(tasks) and not (attempts and attempts[-1].error):
        attempts.append(_attempt(subject, tasks[len(attempts)]))
    return attempts


def _attempt(subject: Subject, task: Task) -> Attempt:
    module, started = task.module(), time.monotonic()
    outcome, error, refused, cut_off = None, "", False, False
    try:
        outcome = fit(subject, task, module=module)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        refused = isinstance(caught, NnxError) and bool(caught.remedy) and not _FOREIGN.search(caught.message)
        cut_off = isinstance(caught, RuntimeError) and bool(_CUT_OFF.search(str(caught)))
    assert isinstance(module, UserPattern)
    return Attempt(
        losses=list(module.losses),
        seen=list(module.seen),
        seconds=time.monotonic() - started,
        outcome=outcome,
        error=error,
        refused=refused,
        cut_off=cut_off,
    )


def _expect_equal_values(seen: Sequence[float], expected: Sequence[float], where: str) -> None:
    expect(
        len(seen) == len(expected),
        f"{where}: user code observed {len(seen)} values, expected {len(expected)}.",
    )
    for number, (value, wanted) in enumerate(zip(seen, expected, strict=True)):
        if not abs(value - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
            raise NumbersDiffer(f"{where}: observed value {number} is {value:.8g}, expected {wanted:.8g}.")
