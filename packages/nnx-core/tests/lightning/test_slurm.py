"""SLURM's requeue signal: the checkpoint is on disk before the job asks to be ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nnx_checkpoint as storage
from jobs.async_training_jobs import ASYNC
from jobs.slurm_jobs import train_under_slurm
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.training import Run


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", [OPTIONS, ASYNC], ids=["waiting", "in the background"])
def test_a_requeued_job_goes_on_where_the_signal_came(
    pool: WorkerPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = Run(options=options, steps=6)
    whole = pool.run(train_under_slurm, run, str(tmp_path), 3, world_size=2)
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    assert storage.verify(tmp_path / "left" / "hpc_ckpt_1.ckpt") == []
    requeued = pool.run(train_under_slurm, run, str(tmp_path / "left"), None, world_size=2)
    assert requeued == [losses[3:] for losses in whole]


def test_a_checkpoint_whose_first_save_was_interrupted_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_2.ckpt" / "20260101T000000.000000-deadbeef").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"first save was interrupted. .*`nnx ckpt gc` removes this one"
    ):
        storage.open_checkpoint(tmp_path / "hpc_ckpt_2.ckpt")
