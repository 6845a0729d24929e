"""A script with copies in memory: ``memory_script.py FOLDER``; rank 1 kills itself once, after step 8."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

import nnx
from nnx_test_helpers.training import Net, Run

FOLDER = Path(sys.argv[1])


class Dies(Callback):
    """Kills rank 1 in the first start."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        mark = FOLDER / "killed"
        if trainer.global_rank == 1 and trainer.global_step == 8 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    module = Net(Run())
    strategy = nnx.strategy("fsdp_auto", memory_checkpoint=3, memory_directory=str(FOLDER))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        callbacks=[Dies()],
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        sys.stdout.write(f"LOSSES {module.losses}\n")
