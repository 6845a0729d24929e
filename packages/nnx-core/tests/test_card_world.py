"""Collectives in a world like that of GPUs, whose default group accepts no tensor in host memory.

Messages of nnx_core and nnx_checkpoint to other ranks must use their own groups. A world made
with ``cuda:gloo`` refuses host memory on its default group exactly as NCCL does, and needs no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs.unit_jobs import Whole
from nnx_base.ranks import (
    all_arrive,
    all_gather_object,
    background_group,
    control_group,
    gather_object,
    together,
)
from nnx_conformance.pool import JobError, WorkerPool
from nnx_conformance.training import mean_over_ranks
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.data_sharding import SharedBatches, make_shares
from nnx_core.agree.divergence import DivergenceCheck
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.errors import DisagreementError
from nnx_test_helpers import async_jobs, checkpoint_jobs


def reduce_on_the_default_group() -> None:
    dist.all_reduce(torch.ones(1))


def talk() -> dict[str, Any]:
    """Use all functions with which ranks compare or agree, and return the results."""
    rank = dist.get_rank()
    said: dict[str, Any] = {
        "objects": all_gather_object(rank, control_group()),
        "gathered": gather_object(rank, background_group()),
        "used": used_anywhere([rank == 0, rank == 1, False]),
        "mean": mean_over_ranks(float(rank)),
        "arrived": all_arrive("here", timeout=30),
    }
    with together(control_group(), doing="testing"):
        pass
    order = CollectiveOrder(remedy="None.")
    with order.reporting():
        order.begin("training_step")
        order.arrive("a gather")
        order.end()
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, float(rank))
    try:
        DivergenceCheck(Whole(None), every=1).compare(module, [])
        said["watch"] = ""
    except DisagreementError as error:
        said["watch"] = str(error)
    try:
        SharedBatches(make_shares(0, 1), every=1).compare(torch.tensor(rank), where="training_step")
        said["batches"] = ""
    except DisagreementError as error:
        said["batches"] = str(error)
    return said


def test_its_default_group_refuses_host_memory_as_nccl_does(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match="No backend type associated with device type cpu"):
        pool.run(reduce_on_the_default_group, init="cuda:gloo")


def test_ranks_agree_and_compare_over_host_memory(pool: WorkerPool) -> None:
    for rank, said in enumerate(pool.run(talk, init="cuda:gloo")):
        assert said["objects"] == [0, 1]
        assert said["gathered"] == ([0, 1] if rank == 0 else None)
        assert said["used"] == [True, True, False]
        assert said["mean"] == 0.5
        assert said["arrived"]
        assert "'weight'" in said["watch"]
        assert "another batch" in said["batches"]


def test_checkpoints_are_saved_and_loaded(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "waiting")
    pool.run(checkpoint_jobs.save_all, path, "sharded", world_size=2, init="cuda:gloo")
    assert pool.run(checkpoint_jobs.load_all, path, world_size=3, init="cuda:gloo") == [[], [], []]
    behind = str(tmp_path / "behind")
    assert all(pool.run(async_jobs.save_and_change, behind, world_size=2, init="cuda:gloo"))
    assert pool.run(checkpoint_jobs.load_all, behind, world_size=2, init="cuda:gloo") == [[], []]
