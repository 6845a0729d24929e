"""One rank acts alone: this works, or every rank raises the same error within seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.lifecycle.errors import MESSAGE, SOON, Ending, FailsInStep, ending_of
from nnx_conformance.subject import Subject
from nnx_conformance.task import FEATURES, Plain, Task, dataset
from nnx_conformance.training import make_trainer

_OURS = ("UnsupportedError: ", "NnxError: ", "DisagreementError: ")
_LAST = 1
"""The rank that fails alone."""


class _SamplesBetweenBatches(Plain):
    def sample(self) -> None:
        with torch.no_grad():
            self(torch.ones(2, FEATURES))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.sample()


class _SamplesBeforeTraining(_SamplesBetweenBatches):
    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            self.sample()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class _CallsALayerBetweenBatches(_SamplesBetweenBatches):
    def sample(self) -> None:
        with torch.no_grad():
            self.embed(torch.ones(2, FEATURES))


class _Stream(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = dataset(Task())
        return (data[number] for number in range(self.samples))


class _ValidatesAStream(Plain):
    def val_dataloader(self) -> Any:
        return DataLoader(_Stream(6 if self.trainer.is_global_zero else 2), batch_size=2)


class _StopsOnRankZero(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.trainer.should_stop = True


class _SavesOnRankZero(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            self.trainer.save_checkpoint(tempfile.mkdtemp() + "/alone.ckpt")


class _SkipsOnTheLastRank(Plain):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if index and self.trainer.local_rank == _LAST else loss


class _LossOfNothing(Plain):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index and self.trainer.local_rank == _LAST:  # no sample of its batch is valid
            return torch.zeros((), requires_grad=True)
        return mse_loss(self(batch[0]), batch[1])


class _LossDropped(Plain):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = super().training_step(batch, index)
        is_dropped = index and self.trainer.local_rank == _LAST
        return torch.zeros((), requires_grad=True) * 1.0 if is_dropped else loss


def train_with(subject: Subject, meeting: str, kind: type[Plain], settings: dict[str, Any]) -> Ending:
    """Train a module of this class."""
    module = kind(Task())
    trainer = make_trainer(subject, module.task, **settings)
    return ending_of(lambda: trainer.fit(module), meeting)


def save_after_failing(subject: Subject, meeting: str, directory: str) -> Ending:
    """Train until one rank fails, with a callback that saves after errors."""
    module = FailsInStep(Task())
    module.only_on = _LAST
    saving = OnExceptionCheckpoint(directory)
    trainer = make_trainer(subject, module.task, callbacks=[saving], enable_checkpointing=True)
    return ending_of(lambda: trainer.fit(module), meeting)


def _endings(bench: Bench, job: Callable[..., Ending], *args: Any) -> list[Ending]:
    meeting = tempfile.mkdtemp(dir=bench.directory)
    return bench.run(job, meeting, *args, world_size=2)


def _expect_one_answer(endings: list[Ending], *, refused: bool = False) -> None:
    """Expect that every rank trained to the end, or that every rank got an error that names a rank."""
    expect(not refused or any(ending.error for ending in endings), "no rank refused it.")
    if not any(ending.error for ending in endings):
        return
    for rank, ending in enumerate(endings):
        where = f"rank {rank} of {len(endings)}"
        is_ours = ending.error.startswith(_OURS) and "rank 1" in ending.error
        expect(is_ours, f"{where}: {ending.error or 'no error'!r}, expected one of nnx that names rank 1.")
        expect(ending.seconds < SOON, f"{where}: it waited for {ending.seconds:.0f} s.")


@check(kinds=("backend",))
def forward_on_rank_zero(bench: Bench) -> None:
    """A forward on rank 0 alone, between two batches, works or is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _SamplesBetweenBatches, {}))


@check(kinds=("backend",))
def forward_on_rank_zero_before_training(bench: Bench) -> None:
    """A forward on rank 0 alone, before the first batch, works or is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _SamplesBeforeTraining, {}))


@check(kinds=("backend",))
def layer_called_on_rank_zero(bench: Bench) -> None:
    """A layer called on rank 0 alone, between two batches, works or is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _CallsALayerBetweenBatches, {}))


@check(kinds=("backend",))
def uneven_validation_batches(bench: Bench) -> None:
    """Validation with fewer batches on one rank works, or is refused on every rank."""
    settings = {"limit_val_batches": None, "val_check_interval": 2}
    _expect_one_answer(_endings(bench, train_with, _ValidatesAStream, settings))


@check(kinds=("backend",))
def constant_loss_on_one_rank(bench: Bench) -> None:
    """A loss that depends on no parameter on one rank works, or is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _LossOfNothing, {}))


@check(kinds=("backend",))
def zeroed_loss_on_one_rank(bench: Bench) -> None:
    """A loss that one rank replaces by zero after its forward works, or is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _LossDropped, {}))


@check(kinds=("backend",), of_adapter=True)
def should_stop_on_one_rank(bench: Bench) -> None:
    """``trainer.should_stop`` on one rank is refused on every rank, with the way to stop all ranks."""
    endings = _endings(bench, train_with, _StopsOnRankZero, {})
    _expect_one_answer(endings, refused=True)
    for rank, ending in enumerate(endings):
        named = "trainer.should_stop" in ending.error
        expect(named, f"rank {rank}: the error does not name it: {ending.error!r}.")


@check(kinds=("backend",))
def save_checkpoint_on_rank_zero(bench: Bench) -> None:
    """``trainer.save_checkpoint`` on rank 0 alone, between two batches, is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _SavesOnRankZero, {}), refused=True)


@check(kinds=("backend",), of_adapter=True)
def none_loss_on_one_rank(bench: Bench) -> None:
    """A ``training_step`` that returns None on one rank is refused on every rank."""
    _expect_one_answer(_endings(bench, train_with, _SkipsOnTheLastRank, {}), refused=True)


@check(kinds=("backend",), of_adapter=True)
def no_save_after_error_on_one_rank(bench: Bench) -> None:
    """``OnExceptionCheckpoint`` saves nothing after an error on one rank, and every rank names that error."""
    directory = tempfile.mkdtemp(dir=bench.directory)
    for rank, ending in enumerate(_endings(bench, save_after_failing, directory)):
        expect(MESSAGE in ending.error, f"rank {rank}: {ending.error!r} does not name the error of rank 1.")
        expect(ending.seconds < SOON, f"rank {rank} waited for {ending.seconds:.0f} s.")
