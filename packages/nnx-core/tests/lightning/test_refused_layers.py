"""Layers and writes that would change the numbers are refused on every rank, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nnx
from nnx_base.errors import NnxError
from nnx_conformance.pool import WorkerPool
from nnx_core.view.modules import refuse_layers
from nnx_fsdp.weights import Weights


class Net(LightningModule):
    """Linear layers, and one user pattern that is refused.

    Args:
        habit: The user pattern.
    """

    def __init__(self, habit: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.habit = habit
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.bank = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        if habit == "max_norm":
            self.rows = nn.Embedding(64, 4, max_norm=1.0)
        elif habit == "script":
            self.net[0] = torch.jit.script(self.net[0])  # type: ignore[no-untyped-call]

    def on_fit_start(self) -> None:
        if self.habit == "replaced":
            self.net[2] = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.habit == "bank":
            with torch.no_grad():
                self.bank[:2] = batch[:2]
        if self.habit == "max_norm":
            batch = batch + self.rows(batch.abs().long())[:, 0]
        return self.net(batch + self.bank.sum(0)).pow(2).mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.habit == "bank between steps":
            with torch.no_grad():
                self.bank.mul_(0.5).add_(batch.mean(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy: str, habit: str, options: Mapping[str, Any], mended: bool) -> str:
    """Train; return the refusal of the run, if any."""
    torch.manual_seed(1)
    trainer = Trainer(
        strategy=nnx.strategy(strategy, **options),
        accelerator="cpu",
        devices=2,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    without = [
        patch("nnx_core.lightning.trainer.refuse_layers", lambda *_, **__: None),
        patch("nnx_core.lightning.trainer.refuse_exchanged", lambda *_: None),
        patch.object(Weights, "take_notes", lambda self: {}),
    ]
    for each in () if mended else without:
        each.start()
    try:
        trainer.fit(Net(habit), DataLoader(torch.randn(64, 4), 4))
    except NnxError as error:
        return str(error)
    except Exception as error:
        return f"unclear: {error}"
    finally:
        for each in () if mended else without:
            each.stop()
    return ""


REFUSED = {
    "max_norm": "rows is an Embedding with max_norm=1.0",
    "script": "net.0 was compiled by torch.jit",
    "replaced": "the parameters of net.2 were exchanged since training began",
    "bank": "the ranks differ in the writes into the parameter 'bank'",
    "bank between steps": "the ranks differ in the writes into the parameter 'bank'",
}
STRATEGIES: dict[str, dict[str, Any]] = {"fsdp_auto": {"min_num_params": 1}, "colossalai": {}}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("habit", REFUSED)
def test_what_would_train_other_numbers_is_refused_on_every_rank(
    pool: WorkerPool, strategy: str, habit: str
) -> None:
    options = STRATEGIES[strategy]
    for said in pool.run(fit, strategy, habit, options, True, world_size=2, timeout=60):
        assert REFUSED[habit] in said
    for said in pool.run(fit, strategy, habit, options, False, world_size=2, timeout=60):
        assert REFUSED[habit] not in said


def test_other_strategies_refuse_such_layers_too(pool: WorkerPool) -> None:
    for said in pool.run(fit, "nnscaler_zero", "max_norm", {}, True, world_size=2, timeout=60):
        assert REFUSED["max_norm"] in said


def test_rows_that_all_ranks_read_may_be_renormalized() -> None:
    refuse_layers(nn.Embedding(4, 2, max_norm=1.0), shares=1)
