"""Ranks with one batch less to predict than others take part in every collective forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnx_conformance.pool import WorkerPool
from nnx_core.lightning.prediction import EvenPrediction


class Predictor(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 5)

    def predict_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> Tensor:
        self.layer(batch[0])
        return batch[0].flatten()


def predict(samples: list[int]) -> list[float]:
    loaders = [
        DataLoader(TensorDataset(torch.arange(count, dtype=torch.float32).unsqueeze(1)), batch_size=3)
        for count in samples
    ]
    trainer = Trainer(strategy="fsdp_auto", accelerator="cpu", devices=2, logger=False)
    predicted: Any = trainer.predict(Predictor(), loaders)
    batches = predicted if len(samples) == 1 else [batch for loader in predicted for batch in loader]
    return [float(value) for batch in batches for value in batch]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("samples", [[13], [12], [13, 2], [13, 13]])
def test_uneven_prediction_with_sharded_parameters_ends_and_repeats_no_sample(
    pool: WorkerPool, samples: list[int]
) -> None:
    ranks = pool.run(predict, samples, world_size=2, timeout=60.0)
    expected = sorted(float(index) for count in samples for index in range(count))
    assert sorted(ranks[0] + ranks[1]) == expected


def test_loaders_of_unknown_length_are_left_alone() -> None:
    even = EvenPrediction()
    even.start([3, float("inf")], most=lambda own: pytest.fail("there is nothing to compare"))
    even.after_step(lambda: pytest.fail("there is nothing to repeat"))


def test_a_step_that_fetches_its_own_batches_is_not_repeated() -> None:
    even = EvenPrediction()
    batches: Iterator[int] = iter([1])
    even.start([1], most=lambda own: 2)
    even.after_step(lambda: pytest.fail("its batches have run out"), batches)
