"""A directory that megatron-core 0.16.1 wrote on two processes is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import nnx_checkpoint
from nnx_base.box import Box
from nnx_core.errors import CheckpointError
from nnx_test_helpers.repository import from_repository

PLACE = from_repository(__file__, "packages/nnx-checkpoint/tests/fixtures/megatron_torch_dist")
FULL = torch.arange(24.0).view(6, 4)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(PLACE, tmp_path / "iter_0000007")
    return tmp_path / "iter_0000007"


def test_weights_are_read_bit_by_bit_and_nothing_is_lost(tmp_path: Path) -> None:
    opened = nnx_checkpoint.open_checkpoint(PLACE)
    assert (opened.format, opened.world_size) == ("megatron", 2)
    layers = torch.stack([FULL + 100 * layer for layer in range(3)]).bfloat16()
    expected = {
        "model.embedding.weight": FULL,
        "model.norm.weight": torch.ones(4),
        "model.decoder.layers.fc.weight": layers,
    }
    assert {name for name in opened.tensors if name.startswith("model.")} == expected.keys()
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in expected.items())
    rows = opened.read("model.decoder.layers.fc.weight", Box((1, 2, 0), (1, 2, 4)))  # of both ranks
    assert torch.equal(rows, layers[1:2, 2:4])
    trainer = opened.objects["trainer"]
    assert torch.equal(trainer["megatron"]["optimizer.state.exp_avg.embedding.weight"], FULL * 2)
    assert trainer["megatron"]["norm._extra_state/shard_0_1"] == [{"a": 1}]
    assert (trainer["common"]["iteration"], trainer["common"]["optimizer"]) == (7, {"lr": 0.1})
    assert trainer["common"]["args"]["tp"] == 2 and "AttnBackend" in trainer["common"]["args"]["attention"]
    for target in ("a.ckpt", "nnx"):
        nnx_checkpoint.convert(PLACE, tmp_path / target)
        again = nnx_checkpoint.open_checkpoint(tmp_path / target)
        assert nnx_checkpoint.compare(opened, again).same, target


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "zarr",
            r"backend 'zarr' in version 1; nnx reads 'torch_dist' in version 1.*--ckpt-format torch_dist",
        ),
        ("config", r"metadata\.json' is malformed"),
        ("common", r"common\.pt' is missing"),
        ("shard", r"__1_0\.distcp"),
    ],
)
def test_other_and_damaged_directories_are_refused(copy: Path, damage: str, message: str) -> None:
    if damage == "zarr":
        body = json.loads((copy / "metadata.json").read_text())
        (copy / "metadata.json").write_text(json.dumps({**body, "sharded_backend": "zarr"}))
    elif damage == "config":
        (copy / "metadata.json").write_text('{"sharded_backend": ')
    elif damage == "common":
        (copy / "common.pt").unlink()
    else:
        (copy / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=message):
        nnx_checkpoint.open_checkpoint(copy)
