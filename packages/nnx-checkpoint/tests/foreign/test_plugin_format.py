"""A plugin's checkpoint format is found through the hook, resumed, and converted in both directions."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.reading.formats import specs
from nnx_core.errors import CheckpointError
from nnx_test_helpers.repository import from_repository


def documented() -> tuple[str, str]:
    """The two files of the example in the documentation."""
    section = (
        from_repository(__file__, "docs/plugins.md")
        .read_text()
        .partition("## A checkpoint format")[2]
        .partition("\n## ")[0]
    )
    plugin, module = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return plugin, module


@pytest.fixture
def npz(site: Any) -> None:
    plugin, module = documented()
    site.add("acme-npz", plugin, modules={"acme_npz_format": module})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"model.a": shard_of(torch.arange(6.0).view(2, 3)), "model.b": shard_of(torch.tensor(7))}
    nnx_checkpoint.save(tmp_path / "a.ckpt", tensors=tensors, objects={"trainer": {}})
    return tmp_path / "a.ckpt"


def test_the_documented_format_is_written_found_and_read(npz: None, saved: Path, tmp_path: Path) -> None:
    nnx_checkpoint.convert(saved, tmp_path / "out.npz", to="npz")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "out.npz")
    assert opened.format == "npz"
    assert torch.equal(opened.read("model.a"), torch.arange(6.0).view(2, 3))
    nnx_checkpoint.convert(tmp_path / "out.npz", tmp_path / "back.ckpt", to="nnx")
    before, after = (nnx_checkpoint.open_checkpoint(path) for path in (saved, tmp_path / "back.ckpt"))
    assert nnx_checkpoint.compare(before, after, only_weights=True).same


def test_a_plugin_cannot_replace_a_format_of_our_own(site: Any) -> None:
    plugin, _ = documented()
    site.add("acme-npz", plugin.replace('"npz"', '"lightning"'))
    assert specs()["lightning"].target.startswith("nnx_checkpoint.foreign.")


def test_a_broken_plugin_does_not_keep_other_formats_from_being_found(
    site: Any, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.add("acme-npz", documented()[0].replace("acme_npz_format", "not_installed"))
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "one.ckpt")
    with caplog.at_level(logging.WARNING, logger="nnx.checkpoint"):
        assert nnx_checkpoint.open_checkpoint(tmp_path / "one.ckpt").format == "lightning"
    assert "Ignoring checkpoint format 'npz'" in caplog.text
    with pytest.raises(CheckpointError, match="not a checkpoint of a known format"):
        nnx_checkpoint.open_checkpoint(tmp_path)
