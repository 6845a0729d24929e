"""Failures: every rank gets the cause, soon, and the user's module survives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_weights
from nnx_conformance.failure_jobs import (
    MESSAGE,
    Ending,
    WithoutData,
    WithoutStep,
    fail_alone,
    fail_in_hook,
    fail_in_step,
    fit_refused,
    fit_with_precision,
    interrupt,
    use_option,
)
from nnx_conformance.task import Task
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import import_reference

SOON = 20.0
"""Seconds in which a rank must have failed; collectives would wait for minutes."""


def _endings(bench: Bench, job: Callable[..., Ending], *args: Any, world_size: int = 2) -> list[Ending]:
    meeting = tempfile.mkdtemp(dir=bench.directory)
    return bench.run(job, meeting, *args, world_size=world_size)


def _expect_cause(endings: Sequence[Ending], *, names: str, ranks: Sequence[int] | None = None) -> None:
    """These ranks (by default all) raised, soon, and say why."""
    for rank in range(len(endings)) if ranks is None else ranks:
        ending, where = endings[rank], f"rank {rank} of {len(endings)}"
        expect(bool(ending.error), f"{where}: no error was raised, expected one with {names!r}.")
        expect(names in ending.error, f"{where}: the error is {ending.error!r}, expected {names!r} in it.")
        expect(
            ending.seconds < SOON, f"{where}: it failed after {ending.seconds:.0f} s, allowed are {SOON:g}."
        )


def _expect_module_after_one_step(bench: Bench, endings: Sequence[Ending]) -> None:
    task = Task(steps=1)
    alone = bench.train_alone(task)
    for rank, ending in enumerate(endings):
        where = f"after the error, rank {rank} of {len(endings)}"
        _expect_weights(ending, alone.weights, tolerance=TOLERANCE[task.dtype], where=where)


def _expect_weights(ending: Ending, expected: Mapping[str, Tensor], *, tolerance: float, where: str) -> None:
    if ending.outcome is None:
        raise CheckFailed(f"{where}: nothing is known of the module.")
    expect_equal_weights(ending.outcome.weights, expected, tolerance=tolerance, where=where)


@check()
def error_in_step(bench: Bench) -> None:
    """An error in ``training_step`` comes out of ``fit`` as it is, on every rank."""
    _expect_cause(_endings(bench, fail_in_step), names=MESSAGE)


@check()
def module_after_an_error(bench: Bench) -> None:
    """After an error on all ranks the module is complete, with the weights of the last step."""
    _expect_module_after_one_step(bench, _endings(bench, fail_in_step))


@check()
def error_on_one_rank(bench: Bench) -> None:
    """A rank that fails alone raises its error within seconds, instead of waiting for the others."""
    last = 1
    endings = _endings(bench, fail_alone, last)
    _expect_cause(endings, names=MESSAGE, ranks=[last])
    for rank, ending in enumerate(endings[:last]):
        expect(bool(ending.error), f"rank {rank} ended without an error although rank {last} had failed.")


@check()
def interrupt_from_the_keyboard(bench: Bench) -> None:
    """An interrupt ends ``fit`` as Lightning ends it, and leaves the module complete."""
    endings = _endings(bench, interrupt)
    for rank, ending in enumerate(endings):
        ended = ending.error.startswith(("SystemExit", "KeyboardInterrupt"))
        expect(ended, f"rank {rank} ended with {ending.error!r}, expected SystemExit or KeyboardInterrupt.")
    _expect_module_after_one_step(bench, endings)


@check(of_adapter=True)
def error_in_configure_model(bench: Bench) -> None:
    """An error in ``configure_model`` comes out of ``fit`` as it is, on every rank."""
    _expect_cause(_endings(bench, fail_in_hook, "configure_model"), names=MESSAGE)


@check(of_adapter=True)
def error_in_configure_optimizers(bench: Bench) -> None:
    """An error in ``configure_optimizers`` comes out of ``fit`` as it is, on every rank."""
    _expect_cause(_endings(bench, fail_in_hook, "configure_optimizers"), names=MESSAGE)


@check(of_adapter=True)
def error_in_validation(bench: Bench) -> None:
    """An error in ``validation_step`` comes out of ``fit`` as it is, on every rank."""
    _expect_cause(_endings(bench, fail_in_hook, "validation_step"), names=MESSAGE)


@check(of_adapter=True)
def fit_without_a_loader(bench: Bench) -> None:
    """``fit`` without data fails with Lightning's message on every rank, and the next ``fit`` works."""
    _expect_recovery(bench, WithoutData, names="train_dataloader")


@check(of_adapter=True)
def fit_without_a_step(bench: Bench) -> None:
    """``fit`` that Lightning refuses before set-up ends with its message, and the next ``fit`` works."""
    _expect_recovery(bench, WithoutStep, names="training_step")


def _expect_recovery(bench: Bench, kind: type[LightningModule], *, names: str) -> None:
    endings = _endings(bench, fit_refused, kind)
    _expect_cause(endings, names=names)
    alone = bench.train_alone(Task())
    for rank, ending in enumerate(endings):
        where = f"the fit after it, rank {rank}"
        _expect_weights(ending, alone.weights, tolerance=TOLERANCE["float32"], where=where)


@check(of_adapter=True)
def unknown_option(bench: Bench) -> None:
    """An option that the strategy does not have is refused by its name, on every rank."""
    _expect_cause(_endings(bench, use_option, "no_such_option", 1), names="no_such_option")


@check(kinds=("backend",), of_adapter=True)
def wrong_option_values(bench: Bench) -> None:
    """Values that the declared choices and types of an option exclude are refused by its name."""
    wrong = _wrong_values(bench)
    if not wrong:
        bench.not_applicable("none of its options declares choices or types")
    for name, value in wrong.items():
        _expect_cause(_endings(bench, use_option, name, value, world_size=1), names=name)


@check()
def undeclared_precisions(bench: Bench) -> None:
    """A precision that is not declared works, or is refused on every rank with its name."""
    known = ("64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
    undeclared = [name for name in known if name not in bench.identity.capabilities.precisions]
    if not undeclared:
        bench.not_applicable("it declares every precision")
    for precision in undeclared:
        endings = _endings(bench, fit_with_precision, precision)
        if any(ending.error for ending in endings):
            _expect_cause(endings, names=precision)


class _Nonsense:
    """A value that no option can mean."""

    def __repr__(self) -> str:
        return "<nonsense>"


def _wrong_values(bench: Bench) -> dict[str, Any]:
    """For options that say what they allow, a value that they do not."""
    options = import_reference(bench.identity.target, what=bench.subject.strategy).Options
    fixed = set(bench.subject.options)
    if bench.subject.name in StrategyRegistry:  # which knows nothing of unregistered classes here
        fixed |= set(StrategyRegistry.get(bench.subject.name).init_params)
    limited = [item for item in fields(options) if item.metadata.get("choices") or item.metadata.get("types")]
    return {item.name: _Nonsense() for item in limited if item.name not in fixed}
