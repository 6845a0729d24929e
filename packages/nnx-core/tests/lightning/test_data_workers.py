"""Data workers are seeded by their process's share of the data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, TensorDataset

from nnx_core.lightning.compat import seed_data_workers


def loader(**settings: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(2)), **settings)  # type: ignore[arg-type]


@pytest.fixture
def workers_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")


def seeded_by(made: DataLoader[tuple[torch.Tensor, ...]]) -> int:
    function = made.worker_init_fn
    assert isinstance(function, partial) and function.func is pl_worker_init_function
    rank: int = function.keywords["rank"]
    return rank


@pytest.mark.usefixtures("workers_are_seeded")
def test_a_loader_is_seeded_by_the_given_rank() -> None:
    made = loader()
    seed_data_workers("lightning.pytorch", made, 3)
    assert seeded_by(made) == 3


def test_the_global_rank_that_fabric_has_put_in_is_replaced() -> None:
    made = loader(worker_init_fn=partial(pl_worker_init_function, rank=7))
    seed_data_workers("lightning.fabric", made, 3)
    assert seeded_by(made) == 3


@pytest.mark.usefixtures("workers_are_seeded")
def test_a_users_own_function_stays() -> None:
    made = loader(worker_init_fn=print)
    seed_data_workers("lightning.pytorch", made, 3)
    assert made.worker_init_fn is print


def test_workers_are_not_seeded_unless_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    made = loader()
    seed_data_workers("lightning.pytorch", made, 3)
    assert made.worker_init_fn is None


@pytest.mark.usefixtures("workers_are_seeded")
def test_iterables_without_workers_are_left_alone() -> None:
    batches = [torch.zeros(1)]
    seed_data_workers("lightning.pytorch", batches, 3)
    assert batches == [torch.zeros(1)]
