"""A run that resumes with another global batch size than its checkpoint's logs this once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_core.lightning.beginning import another_batch

SCRIPT = """
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

import nnx


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy, batch, accumulate, epochs, path=None):
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[nnx.CheckpointIO()] if strategy == "ddp" else None,
    )
    seed_everything(0)
    trainer.fit(Net(), DataLoader(torch.randn(60, 16), batch_size=batch), ckpt_path=path)
    return trainer


fit(sys.argv[1], 8, 1, 1).save_checkpoint("last.ckpt")
for number, (batch, accumulate) in enumerate([(8, 1), (16, 1), (8, 2)]):
    print("run", number, flush=True)
    fit(sys.argv[2], batch, accumulate, 2, "last.ckpt")
"""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param("fsdp_auto", "nnscaler_dp", (16, 32, 32), marks=pytest.mark.full),
        ("ddp", "nnscaler_tp", (8, 16, 16)),
        pytest.param("nnscaler_tp", "ddp", (16, 32, 32), marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_warns_of_another_global_batch(
    tmp_path: Path, first: str, second: str, expected: tuple[int, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, first, second],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    before = 8 if first == "nnscaler_tp" else 16
    for now in {*expected}:
        said = f"trained with a global batch of {before}, this run has {now}"
        assert done.stdout.count(said) == (0 if now == before else expected.count(now)), done.stdout


def test_the_warning_names_what_keeps_the_old_batch() -> None:
    def said(before: int, size: int, **more: int) -> str:
        numbers = {"ranks": 2, "shares": 1, "accumulate": 1, **more}
        return another_batch(before, size, own_batch="plan_ngpus=1", **numbers)

    assert said(16, 8).endswith("16, this run has 8; plan_ngpus=1 or batch_size=16 keeps 16.")
    assert said(32, 8, shares=2).endswith("; batch_size=16 or accumulate_grad_batches=2 keeps 32.")
    assert said(7, 8, shares=2).endswith("of 7, this run has 16.")
    assert said(16, 8, shares=2) == ""
