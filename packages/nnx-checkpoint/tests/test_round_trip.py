"""A checkpoint saved at any world size loads at any other, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers import checkpoint_jobs

SIZES = (1, 2, 3)


@pytest.fixture(scope="module", params=["deduped", "sharded"])
def saved(request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint from each world size."""
    root = tmp_path_factory.mktemp(request.param)
    for size in SIZES:
        pool.run(checkpoint_jobs.save_all, str(root / str(size)), request.param, world_size=size, init="gloo")
    return root


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("readers", SIZES)
@pytest.mark.parametrize("writers", SIZES)
def test_every_tensor_comes_back_at_every_world_size(
    pool: WorkerPool, saved: Path, writers: int, readers: int
) -> None:
    path = str(saved / str(writers))
    assert pool.run(checkpoint_jobs.load_all, path, world_size=readers, init="gloo") == [[]] * readers


@pytest.mark.quick(every=6)
def test_what_was_saved_verifies(saved: Path) -> None:
    for size in SIZES:
        assert nnx_checkpoint.verify(saved / str(size)) == []


def test_deduped_stores_each_byte_once_and_balances_the_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    sizes = pool.run(checkpoint_jobs.bytes_written, path, "deduped", world_size=2, init="gloo")[0]
    headers = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    data = {name: nnx_checkpoint.open_checkpoint(path).manifest.files[name] for name in headers}
    stored = sum(entry.size - entry.digested for entry in data.values())
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    assert stored == sum(entry.nbytes for entry in checkpoint.tensors.values())
    small, large = sorted(entry.size - entry.digested for entry in data.values())
    assert large < 1.02 * small


def test_sharded_stores_what_every_rank_holds(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    pool.run(checkpoint_jobs.save_all, path, "sharded", world_size=2, init="gloo")
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    assert len(checkpoint.tensors["model.replicated"].pieces) == 2
    assert len(checkpoint.tensors["model.rows"].pieces) == 2
    assert len(checkpoint.tensors["model.only_first"].pieces) == 1


def test_tensors_inside_objects_are_lifted_and_read_back(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_dtensors, str(path), world_size=2, init="gloo")
    objects = nnx_checkpoint.open_checkpoint(path).objects
    full = torch.arange(35.0).view(7, 5)
    for name in ("rows", "columns", "whole", "own", "handle"):
        assert torch.equal(objects[name], full), name
    assert objects["only here"] is None
    # A DTensor is stored by all ranks in their own files, not gathered.
    files = {piece.file for piece in nnx_checkpoint.open_checkpoint(path).tensors["objects.rows"].pieces}
    assert len(files) == 2


def test_only_the_bytes_that_are_needed_are_read(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    nnx_checkpoint.save(path, tensors={"model.big": shard_of(torch.randn(4000, 1003))}, objects={})
    ((read, needed),) = pool.run(checkpoint_jobs.load_one_row_of, str(path), world_size=1)
    assert needed == 1000 * 1003 * 4
    assert read < 1.2 * needed  # whole blocks at both ends, header and checksums


def test_a_box_of_a_box_is_read_into_strided_memory(tmp_path: Path) -> None:
    full = torch.randn(700, 1000)
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(full)}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    box = Box((13, 500), (600, 300))
    view = torch.zeros(300, 600).t()
    checkpoint.fill({"w": Shard((700, 1000), torch.float32, (box,), (view,))})
    assert torch.equal(view, full[box.slices])
    assert torch.equal(checkpoint.read("w", box), full[box.slices])
    assert torch.equal(checkpoint.read("w", Box((0, 999), (700, 1))), full[:, 999:])


def test_a_narrow_column_of_a_wide_tensor_is_read(tmp_path: Path) -> None:
    full = torch.arange(40 * 200_000, dtype=torch.int16).view(40, 200_000)
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(full)}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    box = Box((3, 150_001), (30, 7))
    assert torch.equal(checkpoint.read("w", box), full[box.slices])


def test_non_contiguous_and_conjugated_tensors_are_saved(tmp_path: Path) -> None:
    wide = torch.randn(3000, 1500).t()  # larger than what is copied at once
    conj = torch.complex(torch.randn(5), torch.randn(5)).conj()
    expanded = torch.ones(1).expand(6)
    tensors = {"wide": shard_of(wide), "conj": shard_of(conj), "expanded": shard_of(expanded)}
    nnx_checkpoint.save(tmp_path / "a", tensors=tensors, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    assert torch.equal(checkpoint.read("wide"), wide)
    assert torch.equal(checkpoint.read("conj"), conj)
    assert torch.equal(checkpoint.read("expanded"), expanded)


def test_parameters_that_require_gradients_are_saved_and_filled(tmp_path: Path) -> None:
    saved, loaded = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.zeros(3))
    whole = (Box.whole((3,)),)
    nnx_checkpoint.save(
        tmp_path / "a", tensors={"w": Shard((3,), torch.float32, whole, (saved,))}, objects={"p": saved}
    )
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    checkpoint.fill({"w": Shard((3,), torch.float32, whole, (loaded,))})
    assert torch.equal(saved, loaded)
    assert torch.equal(checkpoint.objects["p"], saved)
    assert not checkpoint.objects["p"].requires_grad


def test_a_checkpoint_without_tensors_or_objects_works(tmp_path: Path) -> None:
    nnx_checkpoint.save(tmp_path / "a", tensors={}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    assert (dict(checkpoint.tensors), checkpoint.objects, checkpoint.world_size) == ({}, {}, 1)
    assert nnx_checkpoint.verify(tmp_path / "a") == []


def test_any_safetensors_tool_reads_a_rank_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "w": torch.randn(3, 4),
        "i": torch.tensor([1, 2]),
        "b": torch.tensor(True),
        "h": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
    }
    nnx_checkpoint.save(
        tmp_path / "a", tensors={name: shard_of(value) for name, value in tensors.items()}, objects={}
    )
    directory = tmp_path / "a" / nnx_checkpoint.open_checkpoint(tmp_path / "a").manifest.save_id
    read = load_file(directory / "r00000.safetensors")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], value) for name, value in tensors.items())


def test_torchs_hugging_face_reader_joins_the_rank_files(pool: WorkerPool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_dtensors, str(path), world_size=2, init="gloo")
    state = {"objects.rows": torch.zeros(7, 5), "objects.columns": torch.zeros(7, 5)}
    directory = path / nnx_checkpoint.open_checkpoint(path).manifest.save_id
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    assert torch.equal(state["objects.rows"], torch.arange(35.0).view(7, 5))
    assert torch.equal(state["objects.columns"], torch.arange(35.0).view(7, 5))
