"""The output of ``nnx ckpt`` in docs/checkpoints.md is the real output."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import nnx
from nnx_checkpoint.cli.command import app
from nnx_test_helpers.repository import from_repository

PAGE = from_repository(__file__, "docs/checkpoints.md")
COMMANDS = re.findall(r"```console\n\$ nnx ckpt (.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(LightningModule):
    def __init__(self, width: int = 64, depth: int = 12, rate: float = 0.001) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(500, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 500)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.head(self.blocks(self.embed(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed while it saved ``last.ckpt`` for the first time."""
    folder = tmp_path_factory.mktemp("docs")
    keep = ModelCheckpoint(folder / "runs", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        callbacks=[keep],
        plugins=[nnx.CheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Net(), DataLoader(torch.randint(500, (16, 8)), batch_size=2))
    killed = folder / "runs" / "last.ckpt" / "20261121T143506.500000-0a1b2c3d"
    killed.mkdir(parents=True)
    (killed / "r00000.safetensors").write_bytes(bytes(3_000_000))
    for path in (killed / "r00000.safetensors", killed):
        os.utime(path, (0, 0))  # hours ago, so that `gc` removes it
    return folder


def test_the_page_shows_every_verb() -> None:
    assert {command.split()[0] for command, _ in COMMANDS} == {
        command.name or command.callback.__name__ for command in app.registered_commands
    }


def test_every_screen_is_what_the_command_prints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command, shown in COMMANDS:
        result = CliRunner().invoke(app, command.split())
        assert isinstance(result.exception, (SystemExit, type(None))), (command, result.exception)
        assert matches(normal(shown), normal(result.stdout)), f"$ nnx ckpt {command}\n{result.stdout}"


def normal(text: str) -> list[str]:
    """Return the lines without the parts that vary between runs."""
    for pattern, placeholder in (
        (r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}", "<save>"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+\+00:00)?", "<time>"),
        (r"\d+(\.\d+)? [KMG]?B\b", "<size>"),
        (r"\d+\.\d s\b", "<seconds>"),
        (r"(writer \w+: +)\S+", r"\1<version>"),
        (r"\b0\.00\d+|\b\d\.\d+e-\d+", "<distance>"),
    ):
        text = re.sub(pattern, placeholder, text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def matches(shown: list[str], printed: list[Any]) -> bool:
    """Return True if the output matches the page; a line of dots on the page matches any lines."""
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(matches(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and matches(shown[1:], printed[1:])
