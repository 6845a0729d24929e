"""Meshes are made once for a world."""

from __future__ import annotations

import torch.distributed as dist

from nnx_conformance.pool import WorkerPool
from nnx_fsdp.backend import mesh_of


def make_meshes() -> list[bool]:
    """Whether meshes of one kind are one object, and those of others are not."""
    made = mesh_of("cpu", (1, 2), names=("replicate", "shard"))
    again = mesh_of("cpu", (1, 2), names=("replicate", "shard"))
    other = mesh_of("cpu", (2,), names=("shard",))
    return [again is made, other is made, dist.get_world_size(made.get_group("shard")) == 2]


def test_a_mesh_is_made_once_and_anew_for_the_next_world(pool: WorkerPool) -> None:
    for _ in range(2):  # the pool destroys the world between its jobs
        assert pool.run(make_meshes, world_size=2, init="gloo") == [[True, False, True]] * 2


def test_without_a_world_torch_makes_one(pool: WorkerPool) -> None:
    assert pool.run(make_meshes, world_size=2) == [[True, False, True]] * 2
