"""A user's training script for several nodes: ``python train.py '{"strategy": "fsdp_auto", ...}'``.

It trains a small model as the job says, and prints a report in one line. The tests start the processes as
users start theirs; this script does not know of the laboratory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import nnx
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task, share_of
from nnx_conformance.training import make_trainer, outcome_of


class Steps(Callback):
    """Prints the progress of the training, delays a step, or kills one rank in it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """After each step."""
        if self.job.get("save_each"):
            trainer.save_checkpoint(f"{self.job['save_each']}/step-{trainer.global_step}.ckpt")
        if trainer.is_global_zero:
            print(f"STEP {trainer.global_step}", flush=True)
        time.sleep(self.job.get("seconds", 0.0))
        if self.job.get("dies") == [trainer.global_rank, trainer.global_step]:
            os._exit(7)


def main(job: dict[str, Any]) -> None:
    """Run the training of the job."""
    task = Task(steps=job["steps"], clip=0.5, optimizer="adamw", batches=job.get("batches", 1))
    subject = Subject(job["strategy"], options=job.get("options", {}))
    trainer = make_trainer(
        subject,
        task,
        devices=job["devices"],
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", job["nodes"])),  # torchrun's, of this start
        callbacks=[Steps(job)],
        enable_progress_bar=job.get("bar", False),
        plugins=[nnx.CheckpointIO()] if job["strategy"] == "ddp" else [],
        default_root_dir=os.environ["HOME"],
    )
    module = task.module()
    trainer.fit(module, ckpt_path=job.get("resume"))
    account = {
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "node": trainer.node_rank,
        "local": trainer.local_rank,
        "host": os.uname().nodename,
        "device": str(trainer.strategy.root_device),
        "share": share_of(trainer),
    }
    if job.get("save"):
        trainer.save_checkpoint(job["save"])
    outcome = outcome_of(trainer, module)
    account["losses"] = outcome.losses
    account["sums"] = {name: float(value.double().sum()) for name, value in outcome.weights.items()}
    sys.stdout.write(f"ACCOUNT {json.dumps(account)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = sys.argv[1]
    main(json.loads(Path(given).read_text() if given.endswith(".json") else given))
