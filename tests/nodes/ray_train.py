"""A user's training script for a Ray cluster, run once: ``python ray_train.py '{"strategy": "ddp", ...}'``.

It trains a small model in processes that Ray starts, and saves each step. Every rank writes its identity,
and rank 0 each loss, to the shared disk, because printed output may come late, or twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import nnx
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task, share_of
from nnx_conformance.training import make_trainer


class Account(Callback):
    """Writes the identity of each rank, and every step of rank 0, to files."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the identity of this rank."""
        who = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "node": trainer.node_rank,
            "local": trainer.local_rank,
            "host": os.uname().nodename,
            "share": share_of(trainer),
        }
        name = f"rank-{trainer.node_rank}-{trainer.local_rank}.json"
        (self.folder / name).write_text(json.dumps(who))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        """Write down the loss."""
        if trainer.is_global_zero:
            with (self.folder / "steps.jsonl").open("a") as file:
                line = {"step": trainer.global_step, "loss": module.losses[-1], "at": time.time()}
                file.write(f"{json.dumps(line)}\n")
        time.sleep(self.seconds)


def main(job: dict[str, Any]) -> None:
    """Run the training of the job."""
    folder = Path(job["folder"])
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    task = Task(steps=job["steps"], clip=0.5, optimizer="adamw")
    options = {"launcher": "ray", "address": job["address"], **job.get("options", {})}
    trainer = make_trainer(
        Subject(job["strategy"], options=options),
        task,
        devices=job["devices"],
        num_nodes=job["nodes"],
        enable_checkpointing=True,
        callbacks=[saving, Account(folder, job.get("seconds", 0.0))],
        plugins=[nnx.CheckpointIO()] if job["strategy"] == "ddp" else [],
        default_root_dir=os.environ["HOME"],
    )
    trainer.fit(task.module())
    sys.stdout.write(
        f"ENDED {json.dumps([trainer.global_step, trainer.checkpoint_callback.best_model_path])}\n"
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
