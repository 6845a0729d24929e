"""Directories of other programs with links to the outside are refused, except for Hugging Face's cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import nnx_checkpoint
from nnx_checkpoint.storage.files import require_inside
from nnx_core.errors import CheckpointError


def torch_file(path: Path) -> None:
    torch.save({"module": {"w": torch.ones(2)}, "w": torch.ones(2)}, path)


def deepspeed(path: Path) -> Path:
    (path / "step1").mkdir(parents=True)
    torch_file(path / "step1" / "mp_rank_00_model_states.pt")
    (path / "latest").write_text("step1")
    return path / "step1" / "mp_rank_00_model_states.pt"


def latest_of_deepspeed(path: Path) -> Path:
    deepspeed(path)
    return path / "latest"


def dcp_data(path: Path) -> Path:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=str(path), no_dist=True)
    return next(path.glob("*.distcp"))


def dcp_metadata(path: Path) -> Path:
    dcp_data(path)
    return path / ".metadata"


def safetensors_index(path: Path) -> Path:
    path.mkdir()
    save_file({"w": torch.ones(2)}, path / "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    return index


def safetensors_weights(path: Path) -> Path:
    return safetensors_index(path).with_name("model-1.safetensors")


def colossalai(path: Path) -> Path:
    path.mkdir()
    torch_file(path / "pytorch_model-00001.bin")
    weight_map = {"weight_map": {"w": "pytorch_model-00001.bin"}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(weight_map))
    return path / "pytorch_model-00001.bin"


def nnscaler(path: Path) -> Path:
    path.mkdir()
    torch.save({"nnscaler-extra-state": 1, "state_dict": {}}, path / "0.pt")
    torch_file(path / "1.pt")
    return path / "1.pt"


MADE: list[Callable[[Path], Path]] = [
    deepspeed,
    latest_of_deepspeed,
    dcp_data,
    dcp_metadata,
    safetensors_index,
    safetensors_weights,
    colossalai,
    nnscaler,
]


@pytest.mark.parametrize("make", MADE)
def test_a_file_that_lies_elsewhere_or_is_a_pipe_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    file = make(tmp_path / "a")
    secret = tmp_path / "elsewhere"
    file.rename(secret)
    file.symlink_to(secret)
    with pytest.raises(CheckpointError, match=rf"{file.name}' is a link that leads out of the checkpoint"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a")
    file.unlink()
    os.mkfifo(tmp_path / "a" / "pipe")
    secret.rename(file)
    with pytest.raises(CheckpointError, match=r"pipe' is neither a file nor a directory"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a")


def test_links_within_and_a_directory_that_is_a_link_work(tmp_path: Path) -> None:
    weights = safetensors_weights(tmp_path / "a")
    weights.rename(weights.with_name("kept"))
    weights.symlink_to("kept")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert nnx_checkpoint.open_checkpoint(tmp_path / "b").read("model.w").tolist() == [1, 1]


def test_a_snapshot_in_hugging_faces_cache_has_its_files_in_blobs_and_nowhere_else(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, repository / "blobs" / "12ab")
    (snapshot / "model.safetensors").symlink_to("../../blobs/12ab")
    assert nnx_checkpoint.open_checkpoint(snapshot).read("model.w").tolist() == [1, 1]
    (snapshot / "config.json").symlink_to("../../../models--other--one/blobs/34cd")
    other = tmp_path / "hub" / "models--other--one" / "blobs"
    other.mkdir(parents=True)
    (other / "34cd").write_text("")
    with pytest.raises(CheckpointError, match=r"config.json' is a link that leads out"):
        nnx_checkpoint.open_checkpoint(snapshot)


def test_links_in_circles_and_names_that_climb_are_refused(tmp_path: Path) -> None:
    safetensors_index(tmp_path / "a")
    (tmp_path / "a" / "x").symlink_to("x")
    with pytest.raises(CheckpointError, match="x'"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="leads out"):
        require_inside(tmp_path / "a" / ".." / "..", tmp_path / "a")


def test_a_directory_below_the_first_may_not_be_a_link(tmp_path: Path) -> None:
    deepspeed(tmp_path / "a")
    (tmp_path / "a" / "best").symlink_to("step1")
    nnx_checkpoint.find_format(tmp_path / "a")
    (tmp_path / "a" / "step1" / "zero").symlink_to("..")
    with pytest.raises(CheckpointError, match="zero' is a link to a directory"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a")
