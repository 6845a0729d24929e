"""Habits: what people write around a model, each as a module that has it, and how a strategy is tried on it.

A strategy gives the numbers of one process, or refuses on every rank with an `NnxError` that has a remedy.
Anything else fails: other numbers, an error of torch's or of gloo's, a process that dies, a wait. Where the
habit has ranks do different things, one rank may refuse alone, and its end has to release the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from nnx_conformance.check import Bench, CheckFailed, Refused, check, expect
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import fit
from nnx_core.errors import NnxError

__all__ = ["Attempt", "Habitual", "Manual", "attempt", "chapter", "try_habit"]

TOLERANCE = 2e-5
"""Largest difference of losses, of weights and of what user code saw, all of them near one."""
PROMPT = 30.0
"""Seconds after which a refusal counts as a wait."""
END_AFTER = 5.0
"""Seconds after an error until a rank's process ends although others go on, as that of a script does."""

_FOREIGN = re.compile(r"\b(?!Unsupported|Nnx|Option|Plan)[A-Z]\w*(Error|Exception|EnforceNotMet)\b: ")
_CUT_OFF = re.compile(r"Connection (was likely )?(closed|reset)|Broken pipe|failed to recv|Socket closed")
Module = TypeVar("Module", bound="type[Habitual]")


class Habitual(Plain):
    """The plain module, with a list of what its own code saw.

    Attributes:
        ranks_differ: True if ranks do different things, so that perhaps only one of them can refuse.
        seen: Numbers that hooks and steps read, in order.
    """

    ranks_differ: ClassVar[bool] = False
    seen: list[float]

    def __init__(self, task: Task) -> None:
        self.__dict__["seen"] = []
        super().__init__(task)

    @property
    def up(self) -> Any:
        """The larger layer of the first block."""
        block: Any = self.blocks[0]
        return block.up

    def look(self, *values: Any) -> None:
        """Remember numbers."""
        self.seen.extend(float(value) for value in values)


class Manual(Habitual):
    """The same with manual optimization."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def recorded_loss(self, batch: list[Tensor]) -> Tensor:
        """The loss of one batch."""
        loss = self.loss(batch)
        self.record(loss)
        return loss


@dataclass(frozen=True)
class Attempt:
    """How a run ended on one rank.

    Attributes:
        losses: Mean loss over all ranks of every training batch, until it ended.
        seen: The values that user code read.
        seconds: The time that it took.
        outcome: None where it ended with an error.
        error: The error: its type, text and remedy.
        refused: True if the error is one of ours with a remedy.
        cut_off: True if the error is that of a collective whose other rank is gone.
    """

    losses: list[float]
    seen: list[float]
    seconds: float
    outcome: Outcome | None = None
    error: str = ""
    refused: bool = False
    cut_off: bool = False


def chapter() -> Callable[..., Callable[[Module], Module]]:
    """A decorator that makes a check of a module class that has a habit; its habits are tried in one job.

    The check has the name of the class in snake case; its promise is the first line of the class's docstring.
    The decorator's keyword arguments are what the task has beyond its defaults.
    """
    tasks: dict[str, Task] = {}

    def habit(**changes: Any) -> Callable[[Module], Module]:
        def register(module: Module) -> Module:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", module.__name__).lower()
            tasks[name] = Task(model=module, **{"steps": 4, **changes})

            def run(bench: Bench) -> None:
                for world_size in bench.world_sizes:
                    try_habit(bench, tasks, name, world_size)

            run.__doc__, run.__module__ = module.__doc__, module.__module__
            check(name=name, kinds=("backend", "strategy"), refusable=True, deadline=240.0)(run)
            return module

        return register

    return habit


def try_habit(bench: Bench, chapter: dict[str, Task], name: str, world_size: int) -> None:
    """Hold the attempts of all ranks against that of one process.

    Args:
        bench: The check's tools.
        chapter: The tasks that are tried together.
        name: The name of the one that is looked at.
        world_size: Ranks.

    Raises:
        Refused: Every rank refused it in time, with a remedy, and had the losses of one process until then;
            or, where ranks differ, some did, and the others failed because of that.
        CheckFailed: It ended in any other way than that or with the numbers of one process.
    """
    alone: Attempt = bench.alone(attempt, tuple(chapter.values()))[list(chapter).index(name)]
    expect(not alone.error, f"the reference fails, one plain process: {alone.error}")
    ranks = _attempts(bench, chapter, name, world_size)
    differ = getattr(chapter[name].model, "ranks_differ", False)
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
        expect(len(refusing) == len(ranks), f"only ranks {refusing} refuse: {reason}")
        slowest = max(seen.seconds for seen in ranks)
        expect(slowest < PROMPT, f"it was refused after {slowest:.0f} s: {reason}")
        raise Refused(reason)


def _attempts(bench: Bench, chapter: dict[str, Task], name: str, world_size: int) -> list[Attempt]:
    """One habit's attempts, from a job that tries the chapter; what follows an error has a job of its own."""
    rest = dict(chapter)
    while True:
        try:
            tasks, limit = tuple(rest.values()), 20.0 + 2.0 * len(rest)
            ranks = bench.run_once(attempt, tasks, world_size=world_size, timeout=limit, end_after=END_AFTER)
        except CheckFailed:
            if len(rest) == 1:
                raise
            rest = {name: chapter[name]}
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
    assert isinstance(module, Habitual)
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
    expect(len(seen) == len(expected), f"{where}: user code saw {len(seen)} values, not {len(expected)}.")
    for number, (value, wanted) in enumerate(zip(seen, expected, strict=True)):
        if not abs(value - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
            raise CheckFailed(f"{where}: value {number} that user code saw is {value:.8g}, not {wanted:.8g}.")
