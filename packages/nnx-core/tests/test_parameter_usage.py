"""The parameters that some rank used in a step."""

from __future__ import annotations

import torch.distributed as dist

from nnx_conformance.pool import WorkerPool
from nnx_core.agree.parameter_usage import used_anywhere


def agree_on_use() -> list[bool]:
    """Each rank uses one parameter, and nobody the last."""
    return used_anywhere([index == dist.get_rank() for index in range(3)])


def test_what_one_rank_used_is_used(pool: WorkerPool) -> None:
    assert pool.run(agree_on_use, world_size=2, init="gloo") == [[True, True, False]] * 2


def test_one_process_knows_what_it_used() -> None:
    assert used_anywhere([True, False]) == [True, False]
