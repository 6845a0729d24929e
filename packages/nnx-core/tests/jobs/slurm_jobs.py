"""Runs of Trainer under a pretended SLURM that asks for a checkpoint and requeues the job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.fabric.plugins.environments import SLURMEnvironment

from jobs.async_training_jobs import At
from nnx_test_helpers.async_jobs import delayed
from nnx_test_helpers.lightning_jobs import rank
from nnx_test_helpers.training import MODELS, Run, make_trainer

_SCONTROL = """#!/bin/sh
echo "$@" > '{folder}/asked'
mkdir '{folder}/left' && cp -r '{folder}'/hpc_ckpt_1.ckpt '{folder}/left'
"""


def train_under_slurm(run: Run, folder: str, signal_at: int | None) -> list[float]:
    """Train with a signal of SLURM, which all ranks get after a step.

    The pretended ``scontrol`` copies the files that a job killed at that moment would leave to ``left``.

    Args:
        run: The run.
        folder: Trainer's ``default_root_dir``.
        signal_at: The step after which the signal comes; None for a job without one.

    Returns:
        The losses of this job's steps.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # Lightning leaves one alone that is ignored, as under perf
    tools = Path(folder) / f"tools-{rank()}"
    tools.mkdir()
    (tools / "scontrol").write_text(_SCONTROL.format(folder=folder))
    (tools / "scontrol").chmod(0o755)
    slurm = {"JOB_ID": 1234, "JOB_NAME": "train", "NTASKS": run.devices, "NTASKS_PER_NODE": run.devices}
    slurm |= {"NNODES": 1, "NODEID": 0, "PROCID": rank(), "LOCALID": rank()}
    environment = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    with patch.dict(os.environ, environment), delayed(lambda: time.sleep(0.3)):
        callbacks: list[Any] = []
        if signal_at is not None:
            callbacks.append(At(signal_at, lambda _: os.kill(os.getpid(), signal.SIGUSR2)))
        plugins = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)]
        trainer = make_trainer(run, callbacks=callbacks, plugins=plugins, default_root_dir=folder)
        module = MODELS[run.model](run)
        trainer.fit(module)
    return module.losses
