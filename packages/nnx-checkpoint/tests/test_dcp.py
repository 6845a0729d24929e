"""The storage under torch's own DCP, and the private names of torch that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers import checkpoint_jobs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_bare_dcp_saves_and_loads_at_any_world_size(
    pool: WorkerPool, tmp_path: Path, writers: int, readers: int
) -> None:
    path = str(tmp_path / "a")
    pool.run(checkpoint_jobs.dcp_save, path, world_size=writers, init="gloo")
    assert nnx_checkpoint.verify(path) == []
    results = pool.run(checkpoint_jobs.dcp_load, path, world_size=readers, init="gloo")
    expected = {"weight": True, "bias": [0, 1, 2], "flat": True, "lr": 0.1, "betas": (0.9, 0.999)}
    assert results == [expected] * readers


def test_what_dcp_wrote_opens_as_any_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.dcp_save, str(path), world_size=2, init="gloo")
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    assert set(checkpoint.tensors) == {"layer.weight", "layer.bias", "flat"}
    assert torch.equal(checkpoint.read("flat"), torch.arange(35.0).view(7, 5))
    assert checkpoint.objects["dcp.objects"] == {"lr": 0.1, "betas": (0.9, 0.999)}


def test_dcp_loads_what_nnx_saved(tmp_path: Path) -> None:
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(torch.arange(6.0))}, objects={"step": 1})
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=nnx_checkpoint.Reader(tmp_path / "a"))
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_torchs_converter_reads_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {"model": {"w": torch.ones(3), "deep": [torch.zeros(2)]}, "lr": 0.1}
    dcp.save(state, storage_writer=nnx_checkpoint.Writer(tmp_path / "a"))
    back: dict[str, Any] = {}
    _load_state_dict(
        back,
        storage_reader=nnx_checkpoint.Reader(tmp_path / "a"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert sorted(back) == ["lr", "model"]
    assert str(back["model"]["w"]) == str(state["model"]["w"])
    assert str(back["model"]["deep"]) == str(state["model"]["deep"])
    assert back["lr"] == 0.1


def test_a_failed_write_leaves_the_previous_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.dcp_save, str(path), world_size=2, init="gloo")
    results = pool.run(checkpoint_jobs.dcp_write_failure, str(path), world_size=2, init="gloo")
    assert all("File too large" in result for result in results), results
    assert nnx_checkpoint.verify(path) == []
    assert torch.equal(nnx_checkpoint.open_checkpoint(path).read("layer.bias"), torch.arange(3))


def test_a_dtype_is_never_cast_silently(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=nnx_checkpoint.Writer(tmp_path / "a"))
    with pytest.raises(dcp.api.CheckpointException, match=r"'w' is torch.float32 in checkpoint"):
        dcp.load({"w": torch.zeros(3).int()}, storage_reader=nnx_checkpoint.Reader(tmp_path / "a"))


def test_an_object_without_an_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"the object at 'x' is a builtins.object"):
        dcp.save({"x": object()}, storage_writer=nnx_checkpoint.Writer(tmp_path / "a"))


def test_the_path_can_be_given_to_dcp(tmp_path: Path) -> None:
    writer = nnx_checkpoint.Writer("unused")
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "a")
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=nnx_checkpoint.Reader("unused"), checkpoint_id=tmp_path / "a")
    assert state["w"].tolist() == [1, 1, 1]
    assert nnx_checkpoint.Writer.validate_checkpoint_id("s3://bucket/a")
    assert nnx_checkpoint.Reader.validate_checkpoint_id("/a")


def test_a_handle_stands_for_its_shard_and_cannot_compute() -> None:
    shard = Shard((4, 2), torch.float32, (Box((1, 0), (2, 2)),), (torch.ones(2, 2),))
    handle = nnx_checkpoint.Handle(shard)
    assert isinstance(handle, torch.Tensor)
    assert (tuple(handle.shape), handle.dtype, handle.size(0)) == ((4, 2), torch.float32, 4)
    assert repr(handle) == "Handle(shape=(4, 2), boxes=[Box(offset=(1, 0), size=(2, 2))])"
    with pytest.raises(TypeError, match="stands for a shard in a state dict and cannot compute"):
        torch.add(handle, 1)
    (item,) = handle.__create_write_items__("w", handle)
    assert handle.__get_tensor_shard__(item.index) is shard.data[0]
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with pytest.raises(CheckpointError, match="holds no box at"):
        handle.__get_tensor_shard__(MetadataIndex("w", (0, 0)))
