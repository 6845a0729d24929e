"""Strategies by name in Ray Train, as docs/machines.md shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.ray_jobs import Logging, ranks_of, steps_of, train_in_ray_train
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer

STRATEGIES = (
    *("fsdp_auto", "ddp", "fsdp_hybrid", "nnscaler_deduped", "nnscaler_zero", "colossalai"),
    *("nnx_deepspeed_2", "fairscale_fsdp"),
)


def run(strategy: str, folder: Path, *, says: tuple[int, int] = (1, 2)) -> Any:
    """Train on two workers, which Ray Train counts as one node's: all raylets have one address.

    Args:
        strategy: The strategy.
        folder: The directory for all files.
        says: The Trainer's `num_nodes` and `devices`.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = {"folder": str(folder), "strategy": strategy, "steps": 3}
    return TorchTrainer(
        train_in_ray_train,
        train_loop_config={**config, "nodes": says[0], "devices": says[1]},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name="run", storage_path=str(folder / "ray")),
    ).fit()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_in_ray_train_as_one_process_does(
    strategy: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(strategy, tmp_path)
    task = Task(steps=3, clip=0.5, optimizer="adamw", model=Logging)
    alone = task.module()
    make_trainer(Subject("fsdp_auto"), task, devices=1).fit(alone)
    assert [line["loss"] for line in steps_of(tmp_path)] == pytest.approx(alone.losses, rel=1e-4)
    assert sorted((who["local"], who["node"]) for who in ranks_of(tmp_path)) == [(0, 0), (1, 0)]
    assert (tmp_path / "end.ckpt" / "manifest.json").is_file()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_trainer_that_counts_other_processes_than_ray_train_is_told_the_numbers(
    cluster: Any, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"Pass devices=2, num_nodes=1"):
        run("fsdp_auto", tmp_path, says=(2, 1))
