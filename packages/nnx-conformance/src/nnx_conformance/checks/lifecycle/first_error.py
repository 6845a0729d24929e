"""Cleanup never replaces the first error, even if the ranks can no longer communicate."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from nnx_base.ranks import all_arrive
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.lifecycle.errors import (
    MESSAGE,
    Ending,
    ending_of,
    endings_of,
    expect_cause,
    hang_up,
)
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task
from nnx_conformance.training import make_trainer

PLACES = ("training_step", "backward", "on_before_optimizer_step")
"""The places at which the connection is lost."""


class FailsBeforeTheModel(Plain):
    """Raises in a manual ``training_step`` before the first call of the model."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        raise RuntimeError(MESSAGE)


class LosesTheConnection(Plain):
    """Loses the connection between the ranks in its second step, and raises there.

    Attributes:
        place: One of `PLACES`.

    """

    place = ""

    def _reach(self, place: str) -> None:
        if place != self.place or self.trainer.global_step == 0:
            return
        all_arrive("the lost connection", timeout=5.0)  # a rank may still be in the last step's collectives
        hang_up(keep_store=True)
        if place == "training_step":
            with suppress(RuntimeError):
                self(self.batch)
        raise RuntimeError(MESSAGE)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Call the model without a connection, or fail in backward."""
        self.batch = batch[0]
        self._reach("training_step")
        loss = super().training_step(batch, index)
        loss.register_hook(lambda _: self._reach("backward"))  # type: ignore[no-untyped-call]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._reach("on_before_optimizer_step")


class RecordsTeardown(TorchCheckpointIO):
    """Records whether the strategy closed it, as the last one of its plugins."""

    has_ended = False

    def teardown(self) -> None:
        self.has_ended = True


def fail_before_the_model(subject: Subject, meeting: str) -> Ending:
    """Train with manual optimization until the first step raises."""
    module = FailsBeforeTheModel(Task())
    return ending_of(lambda: make_trainer(subject, module.task).fit(module), meeting)


def lose_the_connection(subject: Subject, meeting: str, place: str) -> Ending:
    """Train until the connection is lost; add a note to the ending if the strategy skipped cleanup."""
    module, plugin = LosesTheConnection(Task()), RecordsTeardown()
    module.place = place
    trainer = make_trainer(subject, module.task, plugins=[plugin])
    ending = ending_of(lambda: trainer.fit(module), meeting)
    if not plugin.has_ended:
        return Ending(f"{ending.error} | and the strategy did not close its plugins", ending.seconds)
    return ending


@check()
def error_before_first_forward(bench: Bench) -> None:
    """``fit`` raises an error of a manual ``training_step`` unchanged, even before the model's first call."""
    _expect_first(endings_of(bench, fail_before_the_model))


@check()
def error_after_lost_connection(bench: Bench) -> None:
    """``fit`` raises the user's error and still cleans up after the ranks lost their connection."""
    for place in PLACES:
        _expect_first(endings_of(bench, lose_the_connection, place))


def _expect_first(endings: list[Ending]) -> None:
    expect_cause(endings, names=MESSAGE)
    for rank, ending in enumerate(endings):
        first = f"RuntimeError: {MESSAGE}"
        is_first = ending.error == first or ending.error.startswith(f"{first} | caused by ")
        expect(is_first, f"rank {rank} finally raised {ending.error!r}, expected {first!r}.")
