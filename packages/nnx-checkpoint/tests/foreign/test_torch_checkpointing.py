"""Directories of `torch_checkpointing`: the library writes what is read, and reads what is written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from jobs.rich_checkpoint import differences, save_rich
from nnx_checkpoint.foreign import torch_checkpointing
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError

pytest.importorskip("torch_checkpointing", reason="it writes the files")

from jobs.torch_checkpointing_jobs import load, manager, save

MORE = [("columns", 2), ("replicas", 4), ("safetensors", 2), ("ddp", 2)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("rows", 2),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in MORE),
    ],
)
def test_what_the_library_writes_is_read_bit_by_bit(
    pool: WorkerPool, tmp_path: Path, kind: str, ranks: int
) -> None:
    expected = pool.run(save, str(tmp_path / "a"), kind, world_size=ranks)[0]
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    assert (opened.format, opened.world_size) == ("torch_checkpointing", ranks)
    read = opened.read_all()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert opened.objects["trainer"]["step"] == 7
    assert opened.objects["optim"][0]["groups"][0]["lr"] == 0.1
    assert [opened.rank_objects(rank)["seed"]["rank"] for rank in range(ranks)] == [*range(ranks)]
    nnx_checkpoint.convert(tmp_path / "a", tmp_path / "b")
    assert nnx_checkpoint.compare(opened, nnx_checkpoint.open_checkpoint(tmp_path / "b")).same


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "tc", to="torch_checkpointing")
    assert differences(source, nnx_checkpoint.open_checkpoint(tmp_path / "tc")) == []


def test_the_library_reads_what_is_written_on_other_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(save, str(tmp_path / "a"), "rows", world_size=3)[0]
    nnx_checkpoint.convert(tmp_path / "a", tmp_path / "nnx")
    nnx_checkpoint.convert(tmp_path / "nnx", tmp_path / "b", to="torch_checkpointing")
    names = sorted(file.name for file in (tmp_path / "b").iterdir())
    assert names == ["metadata.pkl", "model_0.pt", "optimizer_0.pt", "trainer_0.pt"]
    loaded = pool.run(load, str(tmp_path / "b"), world_size=2)[0]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_directory_without_a_record_of_parts_is_read_if_one_rank_wrote_it(
    pool: WorkerPool, tmp_path: Path
) -> None:
    saver = manager()
    saver.save(str(tmp_path / "one"), {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3})
    saver.close()
    assert not (tmp_path / "one" / "metadata.pkl").exists()
    assert nnx_checkpoint.open_checkpoint(tmp_path / "one").read("model.w").tolist() == [[0, 1, 2], [3, 4, 5]]
    pool.run(save, str(tmp_path / "two"), "rows", False, world_size=2)
    with pytest.raises(CheckpointError, match=r"item 'model' of 2 ranks, without a record.*DefaultResharder"):
        nnx_checkpoint.open_checkpoint(tmp_path / "two")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rich(tmp_path / "source")
    monkeypatch.setattr(torch_checkpointing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"not installed.*pip install torch_checkpointing"):
        nnx_checkpoint.convert(tmp_path / "source", tmp_path / "tc", to="torch_checkpointing")
    assert not (tmp_path / "tc").exists()


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def claim(body: dict[str, Any], path: str = '["0.weight"]') -> Any:
    return body["metadata"]["model"]["nested_path_to_metadata"][path][0]


def damaged(place: Path, damage: str) -> None:
    body = pickle.loads((place / "metadata.pkl").read_bytes())
    if damage == "no file":
        (place / "model_1.pt").unlink()
    elif damage == "truncated":
        (place / "model_1.pt").write_bytes((place / "model_1.pt").read_bytes()[:-100])
    elif damage == "evil":
        body["metadata"] = Evil(place / "executed")
    elif damage == "evil file":
        torch.save({"x": Evil(place / "executed")}, place / "model_1.pt")
    elif damage == "version":
        body["version"] = "3.0"
    elif damage == "outside":
        body["metadata"]["model"]["rank_to_layout_info"][1] = {"file_path": "../x.pt"}
    elif damage == "shape":
        claim(body)["sharding_metadata"]["data"]["global_shape"] = [9, 6]
    elif damage == "one rank":
        claim(body)["ranks"] = (0,)
    elif damage == "no record":
        del body["metadata"]["model"]["nested_path_to_metadata"]['["0.weight"]']
    elif damage == "strided":
        placement = {"type": "StridedShard", "dim": 0, "split_factor": 2}
        claim(body)["sharding_metadata"]["data"]["placements"] = [placement]
    elif damage == "kind":
        claim(body)["sharding_metadata"]["type"] = "acme"
    elif damage == "keys":
        del body["metadata"]["model"]["rank_to_layout_info"]
    (place / "metadata.pkl").write_bytes(pickle.dumps(body))


@pytest.fixture(scope="module")
def written(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "a"
    pool.run(save, str(path), "rows", world_size=2)
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no file", r"model_1\.pt' is missing"),
        ("truncated", r"model_1\.pt"),
        ("evil", r"is not plain data"),
        ("evil file", r"model_1\.pt' holds objects that only their own code"),
        ("version", r"has version '3\.0', and 2\.0 is known"),
        ("outside", r"names files outside of itself"),
        ("shape", r"do not make up its shape \(9, 6\)|is not in"),
        ("one rank", r"do not make up its shape \(8, 6\)"),
        ("no record", r"has no record of 'model', \['0\.weight'\]"),
        ("strided", r"has the placement 'StridedShard', which nnx does not read"),
        ("kind", r"has parts of kind 'acme'"),
        ("keys", r"differs from the format of torch_checkpointing: KeyError"),
    ],
)
def test_damaged_directories_are_refused(written: Path, tmp_path: Path, damage: str, message: str) -> None:
    import shutil

    place = tmp_path / "a"
    shutil.copytree(written, place)
    damaged(place, damage)
    with pytest.raises(CheckpointError, match=message):
        nnx_checkpoint.open_checkpoint(place)
    assert not (place / "executed").exists()
