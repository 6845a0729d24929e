"""fairscale's engines in a plain loop train as torch's DDP does, and clean up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.fairscale_jobs import Layer, Loop, patched_names, save_shards, train, train_with_fairscale_alone
from nnx_checkpoint import open_checkpoint
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.weight_jobs import Remembering, Surgeon, refused

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"auto_wrap_policy": Layer}
CASES: dict[str, Loop] = {
    "fsdp": Loop("fsdp"),
    "fsdp, units by class": Loop("fsdp", UNITS),
    "fsdp, units by size": Loop("fsdp", {"min_num_params": 50, "bucket_cap_mb": 0}),
    "fsdp, torch's wrap": Loop("fsdp", wrap="torch"),
    "fsdp, fairscale's wrap": Loop("fsdp", wrap="fairscale"),
    "fsdp, recomputed": Loop(
        "fsdp", {**UNITS, "activation_checkpointing": [Layer], "reshard_after_forward": False}
    ),
    "fsdp, offloaded": Loop("fsdp", {**UNITS, "cpu_offload": True, "move_grads_to_cpu": True}),
    "oss": Loop("oss"),
    "sharded": Loop("sharded"),
    "sharded, small buffers": Loop("sharded", {"reduce_buffer_size": 60}),
    "sharded, no buffers": Loop("sharded", {"reduce_buffer_size": 0}),
}


def _differences(pool: WorkerPool, loop: Loop, *, devices: int = 2) -> tuple[float, float]:
    """The largest differences of losses and weights from DDP's, over all ranks."""
    expected = pool.run(train, replace(loop, engine="ddp", options={}, wrap=""), world_size=devices)
    found = pool.run(train, loop, world_size=devices)
    losses = [
        abs(a - b)
        for one, other in zip(expected, found, strict=True)
        for a, b in zip(one[0], other[0], strict=True)
    ]
    weights = []
    for (_, one), (_, other) in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        weights += [float((one[name] - other[name]).abs().max()) for name in one]
    return max(losses), max(weights)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("case", CASES)
def test_an_engine_trains_exactly_as_ddp_on_two_ranks(pool: WorkerPool, case: str) -> None:
    # With two ranks every sum has two summands, which round alike in any order.
    assert _differences(pool, CASES[case]) == (0.0, 0.0)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("case", ["fsdp, units by class", "oss", "sharded"])
def test_accumulated_and_clipped_an_engine_trains_as_ddp(pool: WorkerPool, case: str, devices: int) -> None:
    loop = replace(CASES[case], accumulate=2, clip=0.05)
    assert max(_differences(pool, loop, devices=devices)) < 1e-6


@pytest.mark.full
def test_a_penalty_on_weights_accumulates_as_in_ddp(pool: WorkerPool) -> None:
    loop = replace(CASES["fsdp, units by class"], accumulate=2, steps=6, penalty=0.05)
    assert max(_differences(pool, loop)) < 1e-6


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("more", [{}, {"fp32_reduce_scatter": True}])
@pytest.mark.parametrize("devices", [1, 2])
def test_fairscales_own_mixed_precision_trains_nearly_as_ddp(
    pool: WorkerPool, devices: int, more: dict[str, Any]
) -> None:
    loop = Loop("fsdp", {**UNITS, "compute_dtype": "bfloat16", **more}, accumulate=2, clip=0.5)
    losses, weights = _differences(pool, loop, devices=devices)
    assert 1e-6 < losses < 0.1 and 1e-6 < weights < 0.05


def test_sharded_ddp_equals_ddp_over_twenty_steps_and_without_the_fix_it_does_not(pool: WorkerPool) -> None:
    loop = Loop("sharded", steps=20)
    assert _differences(pool, loop) == (0.0, 0.0)
    expected = pool.run(train, replace(loop, engine="ddp"), world_size=2)[0][0]
    zeroed = pool.run(train_with_fairscale_alone, loop, False, world_size=2)[0]
    dropped = pool.run(train_with_fairscale_alone, loop, True, world_size=2)[0]
    assert zeroed == expected
    assert dropped[:1] == expected[:1]
    assert max(abs(one - other) for one, other in zip(dropped, expected, strict=True)) > 1e-3


def test_the_shim_is_in_place_only_while_a_backend_is_set_up_on_cpu(pool: WorkerPool) -> None:
    assert pool.run(patched_names, world_size=1) == [(False, True, False)]


def test_sharded_weights_of_old_programs_are_read_under_their_names(pool: WorkerPool, tmp_path: Path) -> None:
    weights = pool.run(save_shards, str(tmp_path), world_size=3)[0]
    saved = open_checkpoint(tmp_path)
    assert (saved.format, saved.world_size) == ("fairscale", 3)
    assert saved.aliases == {"model.back.weight": "model.last.weight"}
    for name, value in weights.items():
        key = saved.aliases.get(f"model.{name}", f"model.{name}")
        torch.testing.assert_close(saved.read(key), value, rtol=0, atol=0)


def test_a_rank_that_is_missing_is_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_shards, str(tmp_path), world_size=2)
    (tmp_path / "model-shard1.pt").unlink()
    with pytest.raises(CheckpointError, match="Make sure that the files of all ranks are there"):
        open_checkpoint(tmp_path)


def test_a_file_of_another_model_is_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_shards, str(tmp_path), world_size=2)
    held: Any = torch.load(tmp_path / "model-shard1.pt", weights_only=False)
    held["weights"].pop("flat_param_0")
    torch.save(held, tmp_path / "model-shard1.pt")
    with pytest.raises(CheckpointError, match=r"has no 'flat_param_0' like that of 'model-shard0.pt'"):
        open_checkpoint(tmp_path)


def test_weights_without_their_metadata_are_not_guessed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_shards, str(tmp_path), world_size=2)
    held: Any = torch.load(tmp_path / "model-shard1.pt", weights_only=False)
    torch.save({"weights": held["weights"]}, tmp_path / "model-shard1.pt")
    with pytest.raises(CheckpointError, match="does not hold both the weights and the metadata of a rank"):
        open_checkpoint(tmp_path)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["fairscale_fsdp", "fairscale_oss", "fairscale_sharded"])
def test_what_each_rank_has_of_its_own_is_refused(pool: WorkerPool, strategy: str) -> None:
    state = pool.run(refused, strategy, {}, Remembering, world_size=2)
    assert all("`optimizer.state` was read" in error for error in state)
    if strategy != "fairscale_fsdp":
        gradients = pool.run(refused, strategy, {}, Surgeon, world_size=2)
        assert all("no backward of the strategy" in error for error in gradients)
