"""Fixture: a small checkpoint that tests may damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnx_checkpoint
from nnx_base.shard import shard_of


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A few tensors, objects, rank objects and an alias; a few kilobytes beside the padded header."""
    path = tmp_path / "small.ckpt"
    tensors = {"model.w": torch.arange(60.0).view(6, 10), "model.step": torch.tensor(3)}
    nnx_checkpoint.save(
        path,
        tensors={name: shard_of(value) for name, value in tensors.items()},
        objects={"epoch": 1, "best": torch.tensor(0.25)},
        rank_objects={"seed": (1, 2)},
        aliases={"model.tied": "model.w"},
    )
    return path


@pytest.fixture
def directory(small: Path) -> Path:
    """The save directory of `small`."""
    return small / nnx_checkpoint.open_checkpoint(small).manifest.save_id
