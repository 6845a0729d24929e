"""An engine's checkpoint without the package that reads it is refused; the error names the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import nnx_checkpoint
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.reading import formats
from nnx_core.errors import CheckpointError


def deepspeed(path: Path) -> Path:
    (path / "step1").mkdir(parents=True)
    torch.save({}, path / "step1" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (path / "latest").write_text("step1")
    return path


def nnscaler(path: Path) -> Path:
    path.mkdir()
    torch.save({"nnscaler-extra-state": {}, "state_dict": {}}, path / "0.pt")
    return path


def nnscaler_merged(path: Path) -> Path:
    return (nnscaler(path) / "0.pt").rename(path / "merged.ckpt")


def colossalai(path: Path) -> Path:
    for name in ("modeling/pytorch_model", "optimizer/pytorch_optim"):
        index = path / f"{name}.bin.index.json"
        index.parent.mkdir(parents=True)
        index.write_text("{}")
    return path


def hugging_face(path: Path) -> Path:
    return colossalai(path) / "modeling"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing but nnx-checkpoint is installed: no other distribution gives formats."""
    monkeypatch.setattr(formats, "_providers", list)


@pytest.mark.parametrize(
    ("write", "package"),
    [
        (deepspeed, "nnx-deepspeed"),
        (nnscaler, "nnx-nnscaler"),
        (nnscaler_merged, "nnx-nnscaler"),
        (colossalai, "nnx-colossalai"),
        (hugging_face, "nnx-colossalai"),
    ],
)
def test_the_error_names_the_package_to_install(
    alone: None, tmp_path: Path, write: Callable[[Path], Path], package: str
) -> None:
    path = write(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=f"reader comes with {package}; .* Run `pip install {package}`"):
        nnx_checkpoint.open_checkpoint(path)
    row = json.loads(CliRunner().invoke(app, ["ls", str(path), "--json"]).stdout)["checkpoints"][0]
    assert (row["format"], row["state"]) == (package.removeprefix("nnx-"), "unchecked")
    assert row["detail"] == f"its reader is not installed. Run `pip install {package}`."
    with pytest.raises(CheckpointError, match=f"Run `pip install {package}`"):
        CliRunner().invoke(app, ["verify", str(path)], catch_exceptions=False)


def test_options_of_the_reader_make_no_other_error(alone: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pip install nnx-deepspeed"):
        formats.get_format("deepspeed").open(deepspeed(tmp_path / "saved"), tag="step1")  # type: ignore[call-arg]


def test_an_installed_reader_takes_the_place() -> None:
    for name in ("deepspeed", "nnscaler", "colossalai"):
        assert formats.specs()[name].target.startswith(f"nnx_{name}.checkpoints:")
        assert formats.get_format(name).name == name
