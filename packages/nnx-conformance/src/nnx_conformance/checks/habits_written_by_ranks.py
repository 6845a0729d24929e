"""What a forward writes into parameters: each rank its own values, which cannot be right, or all the same.

In one process a row that a forward writes is there for every later sample. Ranks that write what they see
would train as many models as there are ranks, or one that is mixed of them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, mse_loss

from nnx_conformance.check import Bench, Refused, check
from nnx_conformance.habits import Habitual, Manual, chapter, try_habit
from nnx_conformance.task import FEATURES, WIDTH, Task

habit = chapter()
_ROWS = 40


class _Bank(Habitual):
    """Remembers the mean of each batch in a row of a frozen parameter, for the losses of later batches."""

    def build(self) -> None:
        super().build()
        self.bank = nn.Parameter(torch.zeros(8, FEATURES), requires_grad=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch[:2]
        outputs = self(inputs)
        remembered: Tensor = mse_loss(outputs, self.bank.sum(0).expand_as(outputs))
        return mse_loss(outputs, targets) + remembered

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = super().training_step(batch, index)
        with torch.no_grad():
            self.bank[index % 8] = self.remembered(batch[0].mean(0))
        return loss

    def remembered(self, mean: Tensor) -> Tensor:
        """What is written of the mean of a rank's samples."""
        return mean


class _BankOfEverySecondBatch(_Bank):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        writes = index % 2 == 1
        return super().training_step(batch, index) if writes else Habitual.training_step(self, batch, index)


class _BankInManualOptimization(_Bank, Manual):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class _SumOfInputs(nn.Linear):
    """Centres its inputs in evaluation by what it has added up in training, in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, FEATURES)
        self.total = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input - 0.01 * self.total)
        with torch.no_grad():
            self.total.add_(input.sum(0), alpha=0.1)
        return super().forward(input)


class _CentredInputs(Habitual):
    def build(self) -> None:
        super().build()
        self.head = _SumOfInputs()


class _RenormalizedRows(Habitual):
    """Looks rows up with ``max_norm=``, which shortens the rows that are read, in a trained parameter."""

    def build(self) -> None:
        super().build()
        self.rows = nn.Parameter(torch.ones(_ROWS, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x[:, 0].abs() * 1000).long() % _ROWS
        return super().forward(x) + embedding(numbers, self.rows, max_norm=0.5)


class _BiasByRank(Habitual):
    """Moves the bias of a layer before the optimizer steps, by an amount of each rank's own."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.up.bias.add_(0.1 * (self.global_rank + 1) * self.trainer.world_size)


def _expect_one_process_or_refusal(bench: Bench, model: type[Habitual], **changes: Any) -> None:
    with suppress(Refused):
        try_habit(bench, {"": Task(model=model, steps=4, **changes)}, "", 2)


@check(kinds=("backend",), deadline=240.0)
def bank_written_by_ranks(bench: Bench) -> None:
    """A memory bank in a parameter, into which each rank writes of its own samples, is refused."""
    _expect_one_process_or_refusal(bench, _Bank)


@check(kinds=("backend",), deadline=240.0)
def bank_written_by_ranks_while_accumulating(bench: Bench) -> None:
    """It is refused where gradients accumulate over two batches."""
    _expect_one_process_or_refusal(bench, _BankOfEverySecondBatch, accumulate=2)


@check("manual_optimization", kinds=("backend",), deadline=240.0)
def bank_written_by_ranks_in_manual_optimization(bench: Bench) -> None:
    """It is refused in manual optimization."""
    _expect_one_process_or_refusal(bench, _BankInManualOptimization)


@check(kinds=("backend",), deadline=240.0)
def sums_kept_by_ranks(bench: Bench) -> None:
    """A running sum in a parameter, to which its layer adds a rank's samples in forward, is refused."""
    _expect_one_process_or_refusal(bench, _CentredInputs)


@check(kinds=("backend",), deadline=240.0)
def rows_renormalized_by_ranks(bench: Bench) -> None:
    """Rows of a trained parameter that a rank renormalizes by `embedding(max_norm=)` are refused."""
    _expect_one_process_or_refusal(bench, _RenormalizedRows)


@check(kinds=("backend",), deadline=240.0)
def bias_written_by_ranks(bench: Bench) -> None:
    """A trained bias, to which each rank adds a number of its own after backward, is refused."""
    _expect_one_process_or_refusal(bench, _BiasByRank)


@habit()
class BankOfAllRanks(_Bank):
    """A memory bank in a parameter, into which all ranks write what `self.all_gather` returns, is kept."""

    def remembered(self, mean: Tensor) -> Tensor:
        """The mean over the samples of all ranks."""
        every: Any = self.all_gather(mean)
        return every.reshape(-1, FEATURES).mean(0)  # type: ignore[no-any-return]
