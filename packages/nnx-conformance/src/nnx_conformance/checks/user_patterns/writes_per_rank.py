"""A forward writes into parameters: per-rank values are refused, equal values are kept.

In one process, every later sample sees a row that a forward wrote. If each rank wrote its own values, the
ranks would train different models, or a mixture of them.

"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, mse_loss

from nnx_conformance.check import Bench, Refused, check
from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job, try_pattern
from nnx_conformance.task import FEATURES, WIDTH, Task

pattern = shared_job()
_ROWS = 40


class _Bank(UserPattern):
    """Stores the mean of each batch in a row of a frozen parameter, for later losses."""

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
        """Return the value to store for the mean of this rank's samples."""
        return mean


class _BankOfEverySecondBatch(_Bank):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        writes = index % 2 == 1
        return (
            super().training_step(batch, index) if writes else UserPattern.training_step(self, batch, index)
        )


class _BankInManualOptimization(_Bank, ManualPattern):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class _SumOfInputs(nn.Linear):
    """Sums up its inputs in a frozen parameter in training, and centres by the sum in evaluation."""

    def __init__(self) -> None:
        super().__init__(WIDTH, FEATURES)
        self.total = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input - 0.01 * self.total)
        with torch.no_grad():
            self.total.add_(input.sum(0), alpha=0.1)
        return super().forward(input)


class _CentredInputs(UserPattern):
    def build(self) -> None:
        super().build()
        self.head = _SumOfInputs()


class _RenormalizedRows(UserPattern):
    """Looks rows up with ``max_norm=``, which shortens the read rows of a trained parameter."""

    def build(self) -> None:
        super().build()
        self.rows = nn.Parameter(torch.ones(_ROWS, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x[:, 0].abs() * 1000).long() % _ROWS
        return super().forward(x) + embedding(numbers, self.rows, max_norm=0.5)


class _BiasByRank(UserPattern):
    """Adds a rank-dependent amount to a bias before the optimizer steps."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.up.bias.add_(0.1 * (self.global_rank + 1) * self.trainer.world_size)


def _expect_one_process_or_refusal(bench: Bench, model: type[UserPattern], **changes: Any) -> None:
    with suppress(Refused):
        try_pattern(bench, {"": Task(model=model, steps=4, **changes)}, "", 2)


@check(kinds=("backend",), deadline=240.0)
def memory_bank_per_rank(bench: Bench) -> None:
    """A memory bank in a parameter, into which each rank writes its own samples, is refused."""
    _expect_one_process_or_refusal(bench, _Bank)


@check(kinds=("backend",), deadline=240.0)
def memory_bank_per_rank_while_accumulating(bench: Bench) -> None:
    """A memory bank of per-rank samples is refused while gradients accumulate over two batches."""
    _expect_one_process_or_refusal(bench, _BankOfEverySecondBatch, accumulate=2)


@check("manual_optimization", kinds=("backend",), deadline=240.0)
def memory_bank_per_rank_in_manual_optimization(bench: Bench) -> None:
    """A memory bank of per-rank samples is refused in manual optimization."""
    _expect_one_process_or_refusal(bench, _BankInManualOptimization)


@check(kinds=("backend",), deadline=240.0)
def running_sum_per_rank(bench: Bench) -> None:
    """A running sum in a parameter, to which forward adds this rank's samples, is refused."""
    _expect_one_process_or_refusal(bench, _CentredInputs)


@check(kinds=("backend",), deadline=240.0)
def embedding_max_norm_per_rank(bench: Bench) -> None:
    """Rows of a trained parameter that each rank renormalizes by `embedding(max_norm=)` are refused."""
    _expect_one_process_or_refusal(bench, _RenormalizedRows)


@check(kinds=("backend",), deadline=240.0)
def bias_written_per_rank(bench: Bench) -> None:
    """A trained bias, to which each rank adds its own number after backward, is refused."""
    _expect_one_process_or_refusal(bench, _BiasByRank)


@pattern()
class MemoryBankGathered(_Bank):
    """A memory bank in a parameter, filled on all ranks from `self.all_gather`, is kept."""

    def remembered(self, mean: Tensor) -> Tensor:
        """Return the mean over the samples of all ranks."""
        every: Any = self.all_gather(mean)
        return every.reshape(-1, FEATURES).mean(0)  # type: ignore[no-any-return]
