"""The commands and the map of docs/hugging-face.md do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nnx_checkpoint
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.foreign.name_maps import NameMap
from nnx_test_helpers.repository import from_repository

pytest.importorskip("transformers", reason="the page is about its models")

from jobs.hf_models import Held, build, save_config

PAGE = from_repository(__file__, "docs/hugging-face.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    (found,) = (
        text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if text.startswith(start)
    )
    return str(found)


def test_the_command_writes_the_files_that_the_page_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nnx_checkpoint.save("run.ckpt", model=Held(build("gpt2")))
    save_config(build("gpt2"), tmp_path / "pretrained")
    result = CliRunner().invoke(app, shlex.split(block("bash", "nnx ckpt"))[2:])
    assert result.exit_code == 0, result.output
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files - {"tokenizer.json"} == {name for name in files if f"`{name}`" in PAGE}
    (back,) = re.findall(r"`nnx ckpt (convert out/ back\.ckpt)`", PAGE)
    assert CliRunner().invoke(app, shlex.split(back)).exit_code == 0
    opened = [nnx_checkpoint.open_checkpoint(name) for name in ("run.ckpt", "back.ckpt")]
    assert nnx_checkpoint.compare(*opened).same


def test_the_map_is_one() -> None:
    names = NameMap.of(json.loads(block("json", "[")), "of the page")
    assert names.to_directory(["net.head.weight", "net.blocks.3.norm.weight", "loss.scale"]) == {
        "net.head.weight": "lm_head.weight",
        "net.blocks.3.norm.weight": "model.layers.3.norm.weight",
    }


def test_the_plugins_function_returns_maps() -> None:
    found: dict[str, Any] = {}
    exec(block("python", "def maps"), found)
    for name, rules in found["maps"]().items():
        assert NameMap.of(rules, name).rules


def test_the_training_of_the_page_is_in_a_test() -> None:
    call = 'fit(model, ckpt_path="pretrained/")'
    assert call in block("python", "trainer = Trainer")  # run as `train` in test_hf_training.py
