"""Meshes are made once for a world."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from nnx_conformance.pool import WorkerPool
from nnx_fsdp.meshes import mesh_of


def make_meshes() -> list[bool]:
    """Return True if a second mesh is the first one, if a mesh of another kind is, and if the group fits."""
    made = mesh_of("cpu", (1, 2), names=("replicate", "shard"))
    again = mesh_of("cpu", (1, 2), names=("replicate", "shard"))
    other = mesh_of("cpu", (2,), names=("shard",))
    return [again is made, other is made, dist.get_world_size(made.get_group("shard")) == 2]


def test_a_mesh_is_made_once_and_anew_for_the_next_world(pool: WorkerPool) -> None:
    for _ in range(2):  # the pool destroys the world between its jobs
        assert pool.run(make_meshes, world_size=2, init="gloo") == [[True, False, True]] * 2


def test_without_a_world_torch_makes_one(pool: WorkerPool) -> None:
    assert pool.run(make_meshes, world_size=2) == [[True, False, True]] * 2


def leave_worlds(folder: str) -> list[bool]:
    """Return True for each of three successive worlds that is still referenced after the last mesh."""
    worlds = []
    for number in range(3):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=size)
        mesh = mesh_of("cpu", (size,), names=("shard",))
        distribute_tensor(torch.ones(3 + number, 2), mesh, [Shard(0)]).full_tensor()
        worlds.append(weakref.ref(dist.group.WORLD))
        del mesh
        dist.destroy_process_group()
        gc.collect()
    return [world() is not None for world in worlds]


def test_nothing_of_a_world_that_is_gone_stays_with_the_next(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(leave_worlds, str(tmp_path), world_size=2) == [[False, False, True]] * 2
