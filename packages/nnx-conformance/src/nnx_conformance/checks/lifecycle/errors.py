"""Every rank gets the cause of a failure within seconds, and the user's module survives."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.inheritance import get_all_subclasses
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

import nnx_core
from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task, process_rank_and_size
from nnx_conformance.training import make_trainer, outcome_of, world_size
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import import_reference

MESSAGE = "planted by the conformance suite"


@dataclass(frozen=True)
class Ending:
    """The end of a run on one rank.

    Attributes:
        error: Type and text of the error and of its causes; empty if there was none.
        seconds: The duration.
        ended: The time of the end, by this rank's clock.
        outcome: Describes the module afterwards.

    """

    error: str
    seconds: float
    ended: float = 0.0
    outcome: Outcome | None = None


class FailsInStep(Plain):
    """Raises in its second training step.

    Attributes:
        error: The error to raise.
        only_on: The rank that fails; all ranks by default.
        failures: The times of the failures.

    """

    error: type[BaseException] = RuntimeError
    only_on: int | None = None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.failures: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 1 and self.only_on in (None, process_rank_and_size()[0]):
            self.failures.append(time.monotonic())
            raise self.error(MESSAGE)
        return super().training_step(batch, index)


class FailsInHook(Plain):
    """Raises in the hook named by `hook`."""

    hook = "configure_model"

    def _reach(self, hook: str) -> None:
        if hook == self.hook:
            raise RuntimeError(MESSAGE)

    def configure_model(self) -> None:
        self._reach("configure_model")

    def configure_optimizers(self) -> Any:
        self._reach("configure_optimizers")
        return super().configure_optimizers()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self._reach("validation_step")
        super().validation_step(batch, index)


class AccumulatesAfterAnError(Plain):
    """Catches an error in its second backward and continues to accumulate, without `zero_grad`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Step after the third batch, with the leftover gradients of the failed backward."""
        optimizer: Any = self.optimizers()
        hidden = self.blocks[0](self.embed(batch[0]))
        if index == 1:
            hidden.register_hook(_fail)
        loss = torch.nn.functional.mse_loss(self.head(self.blocks[1](hidden)), batch[1])
        with suppress(_PlantedError):
            self.manual_backward(loss)
        if index == 2:
            optimizer.step()


class _PlantedError(Exception):
    pass


def _fail(_: Tensor) -> None:
    raise _PlantedError


class WithoutStep(LightningModule):
    """A module that Lightning refuses before it sets up the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithoutData(WithoutStep):
    """A module without data."""

    def training_step(self, batch: Any, index: int) -> None:
        """Never reached."""


def fail_in_step(subject: Subject, meeting: str) -> Ending:
    """Train until the second step raises, on all ranks."""
    module = FailsInStep(Task())
    trainer = make_trainer(subject, module.task)
    ending = ending_of(lambda: trainer.fit(module), meeting)
    return replace(ending, outcome=outcome_of(trainer, module))


def accumulate_after_an_error(subject: Subject, meeting: str) -> Ending:
    """Train until a step would use leftover gradients of a failed backward."""
    module = AccumulatesAfterAnError(Task())
    return ending_of(lambda: make_trainer(subject, module.task).fit(module), meeting)


def fail_alone(subject: Subject, meeting: str, rank: int) -> Ending:
    """Train until the second step raises on one rank; measure the seconds from there, on that rank."""
    failures: list[float] = []

    def run() -> None:
        module = FailsInStep(Task())
        module.only_on = rank
        module.failures = failures
        make_trainer(subject, module.task).fit(module)

    ending = ending_of(run, meeting, patience=0.0)
    return replace(ending, seconds=ending.ended - failures[0]) if failures else ending


def interrupt(subject: Subject, meeting: str) -> Ending:
    """Train until a keyboard interrupt in the second step, on all ranks."""
    module = FailsInStep(Task())
    module.error = KeyboardInterrupt
    trainer = make_trainer(subject, module.task)
    handler = signal.getsignal(signal.SIGINT)
    try:
        ending = ending_of(lambda: trainer.fit(module), meeting)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves the signal ignored
    return replace(ending, outcome=outcome_of(trainer, module))


def fail_in_hook(subject: Subject, meeting: str, hook: str) -> Ending:
    """Train a module with a hook that raises, on all ranks."""
    module = FailsInHook(Task())
    module.hook = hook
    trainer = make_trainer(subject, module.task, limit_val_batches=1, num_sanity_val_steps=1)
    return ending_of(lambda: trainer.fit(module), meeting)


def fit_refused(subject: Subject, meeting: str, kind: type[LightningModule]) -> Ending:
    """Train a module that Lightning refuses, and then one that it accepts."""
    ending = ending_of(lambda: make_trainer(subject, Task()).fit(kind()), meeting)
    _stop_recording_loaders()
    module = Plain(Task())
    trainer = make_trainer(subject, module.task)
    trainer.fit(module)
    return replace(ending, outcome=outcome_of(trainer, module))


def _stop_recording_loaders() -> None:
    """Restore the loader classes, which Lightning leaves patched after an error in a data hook.

    Otherwise Lightning would treat every later loader of this process as made inside such a hook.
    Upstream: ``_replace_dunder_methods`` of ``lightning.fabric.utilities.data``, 2.6.

    """
    for base in (DataLoader, BatchSampler):
        for kind in get_all_subclasses(base) | {base}:
            for name in ("__setattr__", "__delattr__", "__init__"):
                if (own := vars(kind).get(f"__old{name}")) is not None:
                    setattr(kind, name, own)
                    delattr(kind, f"__old{name}")


def use_option(subject: Subject, meeting: str, name: str, value: Any) -> Ending:
    """Build the strategy with one more option, and train."""

    def run() -> None:
        strategy = nnx_core.strategy(
            subject.name, namespace="lightning.pytorch", **{**subject.options, name: value}
        )
        make_trainer(subject, Task(), strategy=strategy).fit(Plain(Task()))

    return ending_of(run, meeting)


def fit_with_precision(subject: Subject, meeting: str, precision: str) -> Ending:
    """Train with this precision."""
    return ending_of(lambda: make_trainer(subject, Task(precision=precision)).fit(Plain(Task())), meeting)


def ending_of(run: Callable[[], None], meeting: str, *, patience: float = 2.0) -> Ending:
    """Call a function that should fail.

    A failed rank closes its connections if other ranks do not end. Without this they would wait for it, and
    the check would find the same hang minutes later.

    Args:
        run: The function to call.
        meeting: An empty directory, in which each rank marks its end.
        patience: Seconds for the other ranks to end.

    """
    ranks, started = world_size(), time.monotonic()
    text = ""
    try:
        run()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        text = " | caused by ".join(f"{type(one).__name__}: {one}" for one in _chain(error))
    ended = time.monotonic()
    Path(meeting, os.environ["RANK"]).touch()
    if text:
        while (
            is_missing := len(list(Path(meeting).iterdir())) < ranks
        ) and time.monotonic() < ended + patience:
            time.sleep(0.01)
        if is_missing:
            hang_up()
    return Ending(text, ended - started, ended)


def hang_up(*, keep_store: bool = False) -> None:
    """Shut down the network connections of this process, as its death would.

    Args:
        keep_store: True to keep the connection to the store of the process group.

    """
    kept = int(os.environ["MASTER_PORT"]) if keep_store else None
    for descriptor in range(3, 1024):
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            continue
        try:
            with suppress(OSError):  # the other side, or a thread of gloo, has just closed it
                is_open = not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                is_of_network = is_open and connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_of_network and kept not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__  # a replacing error does not print this one


SOON = 20.0
"""Seconds in which a rank must have failed; collectives would wait for minutes."""


def endings_of(bench: Bench, job: Callable[..., Ending], *args: Any, world_size: int = 2) -> list[Ending]:
    """Run a job that should fail, and return its ending on every rank."""
    meeting = tempfile.mkdtemp(dir=bench.directory)
    return bench.run(job, meeting, *args, world_size=world_size)


def expect_cause(endings: Sequence[Ending], *, names: str, ranks: Sequence[int] | None = None) -> None:
    """Expect that these ranks (by default all) raised within seconds, with the cause in the message."""
    for rank in range(len(endings)) if ranks is None else ranks:
        ending, where = endings[rank], f"rank {rank} of {len(endings)}"
        expect(bool(ending.error), f"{where}: the run raised no error, expected one with {names!r}.")
        expect(names in ending.error, f"{where}: the error is {ending.error!r}, expected {names!r} in it.")
        expect(ending.seconds < SOON, f"{where}: failed after {ending.seconds:.0f} s, allowed are {SOON:g}.")


def _expect_module_after_one_step(bench: Bench, endings: Sequence[Ending]) -> None:
    task = Task(steps=1)
    alone = bench.train_alone(task)
    for rank, ending in enumerate(endings):
        where = f"after the error, rank {rank} of {len(endings)}"
        _expect_weights(ending, alone.weights, tolerance=TOLERANCE[task.dtype], where=where)


def _expect_weights(ending: Ending, expected: Mapping[str, Tensor], *, tolerance: float, where: str) -> None:
    if ending.outcome is None:
        raise CheckFailed(f"{where}: the job reported no state of the module.")
    expect_equal_weights(ending.outcome.weights, expected, tolerance=tolerance, where=where)


@check()
def error_in_training_step(bench: Bench) -> None:
    """``fit`` raises an error of ``training_step`` unchanged, on every rank."""
    expect_cause(endings_of(bench, fail_in_step), names=MESSAGE)


@check()
def module_complete_after_error(bench: Bench) -> None:
    """The module is complete after an error on all ranks, with the weights of the last step."""
    _expect_module_after_one_step(bench, endings_of(bench, fail_in_step))


@check()
def error_on_one_rank(bench: Bench) -> None:
    """A rank that fails alone raises its error within seconds, instead of waiting for the others."""
    last = 1
    endings = endings_of(bench, fail_alone, last)
    expect_cause(endings, names=MESSAGE, ranks=[last])
    for rank, ending in enumerate(endings[:last]):
        expect(bool(ending.error), f"rank {rank} ended without an error although rank {last} had failed.")


@check("manual_optimization", "gradient_accumulation", kinds=("backend",))
def backward_error_without_zero_grad(bench: Bench) -> None:
    """After a caught error in backward, a step without ``zero_grad`` is refused on every rank."""
    expect_cause(endings_of(bench, accumulate_after_an_error), names="a backward ended with an error")


@check()
def keyboard_interrupt(bench: Bench) -> None:
    """A keyboard interrupt ends ``fit`` as in plain Lightning, and leaves the module complete."""
    endings = endings_of(bench, interrupt)
    for rank, ending in enumerate(endings):
        ended = ending.error.startswith(("SystemExit", "KeyboardInterrupt"))
        expect(ended, f"rank {rank} ended with {ending.error!r}, expected SystemExit or KeyboardInterrupt.")
    _expect_module_after_one_step(bench, endings)


@check(of_adapter=True)
def error_in_configure_model(bench: Bench) -> None:
    """``fit`` raises an error of ``configure_model`` unchanged, on every rank."""
    expect_cause(endings_of(bench, fail_in_hook, "configure_model"), names=MESSAGE)


@check(of_adapter=True)
def error_in_configure_optimizers(bench: Bench) -> None:
    """``fit`` raises an error of ``configure_optimizers`` unchanged, on every rank."""
    expect_cause(endings_of(bench, fail_in_hook, "configure_optimizers"), names=MESSAGE)


@check(of_adapter=True)
def error_in_validation(bench: Bench) -> None:
    """``fit`` raises an error of ``validation_step`` unchanged, on every rank."""
    expect_cause(endings_of(bench, fail_in_hook, "validation_step"), names=MESSAGE)


@check(of_adapter=True)
def fit_without_loader(bench: Bench) -> None:
    """``fit`` without data fails with Lightning's message on every rank, and the next ``fit`` works."""
    _expect_recovery(bench, WithoutData, names="train_dataloader")


@check(of_adapter=True)
def fit_without_training_step(bench: Bench) -> None:
    """``fit`` raises Lightning's refusal of a module on every rank, and the next ``fit`` works."""
    _expect_recovery(bench, WithoutStep, names="training_step")


def _expect_recovery(bench: Bench, kind: type[LightningModule], *, names: str) -> None:
    endings = endings_of(bench, fit_refused, kind)
    expect_cause(endings, names=names)
    alone = bench.train_alone(Task())
    for rank, ending in enumerate(endings):
        where = f"the next fit, rank {rank}"
        _expect_weights(ending, alone.weights, tolerance=TOLERANCE["float32"], where=where)


@check(of_adapter=True)
def unknown_option(bench: Bench) -> None:
    """Every rank refuses an unknown option by its name."""
    expect_cause(endings_of(bench, use_option, "no_such_option", 1), names="no_such_option")


@check(kinds=("backend",), of_adapter=True)
def invalid_option_values(bench: Bench) -> None:
    """Values outside an option's declared choices and types are refused by the option's name."""
    wrong = _wrong_values(bench)
    if not wrong:
        bench.not_applicable("no option declares choices or types")
    for name, value in wrong.items():
        expect_cause(endings_of(bench, use_option, name, value, world_size=1), names=name)


@check()
def undeclared_precisions(bench: Bench) -> None:
    """An undeclared precision works, or is refused on every rank by its name."""
    known = ("64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
    undeclared = [name for name in known if name not in bench.identity.capabilities.precisions]
    if not undeclared:
        bench.not_applicable("the strategy declares every precision")
    for precision in undeclared:
        endings = endings_of(bench, fit_with_precision, precision)
        if any(ending.error for ending in endings):
            expect_cause(endings, names=precision)


class _Nonsense:
    """A value that fits no option."""

    def __repr__(self) -> str:
        return "<nonsense>"


def _wrong_values(bench: Bench) -> dict[str, Any]:
    """Return an invalid value for each option with declared choices or types."""
    options = import_reference(bench.identity.target, what=bench.subject.strategy).Options
    fixed = set(bench.subject.options)
    if bench.subject.name in StrategyRegistry:  # unregistered classes have no spec here
        fixed |= set(StrategyRegistry.get(bench.subject.name).init_params)
    limited = [item for item in fields(options) if item.metadata.get("choices") or item.metadata.get("types")]
    return {item.name: _Nonsense() for item in limited if item.name not in fixed}
