"""A user's script for elastic training: ``python elastic.py '{"strategy": "torchft_hsdp", ...}'``.

It notes the samples of each step, and saves the weights at the end, in a folder that all nodes share.
Steps are slow until there is a file ``go``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nnx

SAMPLES, BATCH = 60, 12


class Model(LightningModule):
    """Two layers, in float64."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.job = job
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        name = f"{os.environ.get('NNX_ELASTIC_GROUP', 'alone')}-{os.environ.get('RANK', '0')}-{os.getpid()}"
        self.notes = (Path(job["folder"]) / f"{name}.jsonl").open("a")

    def note(self, **what: Any) -> None:
        """Write down an event."""
        self.notes.write(json.dumps(what) + "\n")
        self.notes.flush()

    def training_step(self, batch: Any, index: int) -> Any:
        rows, x, y = batch
        quorum = getattr(self.trainer.strategy, "quorum", None)
        share = (0, 1) if quorum is None else (quorum.share.index, quorum.share.of)
        self.note(step=self.trainer.global_step, share=share, rows=rows.tolist())
        if not (Path(self.job["folder"]) / "go").exists():
            time.sleep(self.job["seconds"])
        return (self.net(x) - y).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(committed=self.trainer.global_step - 1)
        if self.trainer.is_global_zero:
            print(f"STEP {self.trainer.global_step}", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(job: dict[str, Any]) -> None:
    """Train, and save the weights."""
    seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(torch.arange(SAMPLES), x, x[:, :1].sin())
    trainer = Trainer(
        strategy=nnx.strategy(job["strategy"], **job["options"]),
        accelerator="cpu",
        devices=job["devices"],
        max_steps=job["steps"],
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job["folder"],
    )
    model = Model(job)
    trainer.fit(model, DataLoader(data, batch_size=BATCH))
    if os.environ.get("RANK", "0") == "0":
        name = os.environ.get("NNX_ELASTIC_GROUP", "alone")
        torch.save(model.net.state_dict(), Path(job["folder"]) / f"{name}.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
