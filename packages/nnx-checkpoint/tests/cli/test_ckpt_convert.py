"""Tests of ``nnx ckpt convert`` and ``merge``, and of ``inspect``, ``verify`` and ``ls`` on other formats."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import nnx_checkpoint as storage
from nnx_base.shard import shard_of
from nnx_checkpoint.cli import files, verification
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.reading.formats import writable
from nnx_core.errors import CheckpointError

TENSORS = {
    "model.w": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(4),
    "optim.0.state.w.exp_avg": torch.ones(3, 4),
}


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    storage.save(
        tmp_path / "trained",
        tensors={name: shard_of(value) for name, value in TENSORS.items()},
        objects={
            "trainer": {"epoch": 2, "global_step": 7, "pytorch-lightning_version": "2.6.6"},
            "optim": [{"groups": [{"params": ["w", "b"], "lr": 0.1}], "values": {}}],
        },
        aliases={"model.tied": "model.w"},
    )
    return tmp_path / "trained"


@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_a_file_of_lightnings_comes_out_and_holds_the_same(verb: str, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.ckpt"
    result = invoke(verb, trained, target)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{target}: lightning, ")
    loaded = torch.load(target, weights_only=True)
    assert torch.equal(loaded["state_dict"]["tied"], TENSORS["model.w"])
    assert invoke("diff", trained, target).stdout.startswith("Equal; 3 tensors compared")


def test_every_format_that_can_be_written_is_offered_and_can_be_read_back(
    trained: Path, tmp_path: Path
) -> None:
    for name in writable():
        if name == "hf":  # of models of transformers only: tests/foreign/test_hf_directory.py
            continue
        if name == "torch_checkpointing" and find_spec(name) is None:
            continue
        target = tmp_path / f"as_{name}"
        result = invoke("convert", trained, target, "--to", name, "--json")
        content = json.loads(result.stdout)
        assert (content["source"], content["target"], content["format"]) == (str(trained), str(target), name)
        assert content["bytes"] > 0
        assert invoke("diff", trained, target).exit_code == 0, name


def test_merge_takes_the_files_of_a_checkpoint_too(trained: Path, tmp_path: Path) -> None:
    invoke("convert", trained, tmp_path / "hf", "--to", "safetensors", "-o", "max_shard_size=40")
    files = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(files) == 2
    assert invoke("merge", *files, tmp_path / "merged.safetensors").exit_code == 0
    assert invoke("diff", "--only-weights", trained, tmp_path / "merged.safetensors").exit_code == 0


def test_only_weights_are_written_if_asked(trained: Path, tmp_path: Path) -> None:
    for verb in ("convert", "merge"):
        invoke(verb, trained, tmp_path / f"{verb}.ckpt", "--only-weights")
        opened = storage.open_checkpoint(tmp_path / f"{verb}.ckpt")
        assert set(opened.tensors) == {"model.w", "model.b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "safetensor"], "unknown checkpoint format 'safetensor'; did you mean 'safetensors'?"),
        (["--to", "deepspeed"], "format 'deepspeed' can be read but not written. Use one of nnx,"),
        (
            ["--to", "safetensors", "-o", "size=3"],
            "unknown option 'size'; the options of the format are: max_shard_size, prefix",
        ),
        (["-o", "max_shard_size"], "'max_shard_size' is not of the form NAME=VALUE."),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_usage_exits_with_2_and_helps(
    trained: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        app, ["convert", str(trained), str(tmp_path / "target"), *arguments]
    )
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "target").exists()


def test_what_is_there_is_never_overwritten(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "there.ckpt").write_text("precious")
    for verb in ("convert", "merge"):
        with pytest.raises(CheckpointError, match="exists already"):
            invoke(verb, trained, tmp_path / "there.ckpt")
    assert (tmp_path / "there.ckpt").read_text() == "precious"


def test_other_formats_are_not_written_to_urls(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.ckpt", "a.safetensors"):
        with pytest.raises(CheckpointError, match="are written to paths, not to URLs"):
            invoke("convert", trained, f"memory://somewhere/{name}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["trained"]


def test_other_formats_are_inspected(trained: Path, tmp_path: Path) -> None:
    invoke("convert", trained, tmp_path / "one.ckpt")
    lines = [" ".join(line.split()) for line in invoke("inspect", tmp_path / "one.ckpt").stdout.splitlines()]
    for expected in (
        "format: lightning",
        "epoch: 2",
        "step: 7",
        "optimizer 0: state of 1 parameters: exp_avg (48 B)",
        "optimizer 0, group 0: 2 parameters, lr=0.1",
        "tied tied to model.w",
    ):
        assert expected in lines, expected
    content = json.loads(invoke("inspect", tmp_path / "one.ckpt", "--json").stdout)
    assert (content["format"], content["version"], content["save_id"]) == ("lightning", [], "")
    assert content["files"] == {"one.ckpt": (tmp_path / "one.ckpt").stat().st_size}


def test_other_formats_are_verified_as_far_as_that_goes(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.ckpt"
    invoke("convert", trained, target)
    result = invoke("verify", target)
    assert result.exit_code == 0
    assert "has no checksums of its own" in result.stdout
    assert "3 tensors lie inside their files, and 1 of 1 files are zip archives" in result.stdout
    content = json.loads(invoke("verify", target, "--json").stdout)
    assert (content["whole"], content["checksums"], content["archives"]) == (True, False, 1)
    raw = bytearray(target.read_bytes())
    raw[raw.index(TENSORS["model.w"].numpy().tobytes()) + 5] ^= 1
    target.write_bytes(raw)
    result = invoke("verify", target)
    assert result.exit_code == 1
    assert "does not match its CRC-32" in result.stdout
    target.write_bytes(raw[: len(raw) // 2])
    result = CliRunner().invoke(app, ["verify", str(target)])
    assert result.exit_code == 1
    assert isinstance(result.exception, (CheckpointError, SystemExit))


def test_a_safetensors_file_that_is_cut_off_is_damaged(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    invoke("convert", trained, target)
    assert invoke("verify", target).exit_code == 0
    target.write_bytes(target.read_bytes()[:-4])
    with pytest.raises(CheckpointError):
        invoke("verify", target)


def test_a_checkpoint_of_another_program_runs_nothing_unless_it_is_trusted(tmp_path: Path) -> None:
    target = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "payload": Payload(str(tmp_path / "ran"))}, target)
    for verb in ("inspect", "verify", "convert"):
        rest = [tmp_path / "copy"] if verb == "convert" else []
        with pytest.raises(CheckpointError) as caught:
            invoke(verb, target, *rest)
        assert "weights_only=False" in caught.value.remedy
    assert not (tmp_path / "ran").exists()
    assert invoke("inspect", target, "--trust").exit_code == 0
    assert (tmp_path / "ran").exists()


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("verb", ["convert", "merge", "diff", "verify"])
def test_a_progress_bar_with_bytes_per_second_is_drawn_on_a_terminal(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big, target = str(tmp_path / "big"), str(tmp_path / "one.ckpt")
    storage.save(big, tensors={"model.w": shard_of(torch.zeros(40 << 20, dtype=torch.uint8))}, objects={})
    main, terminal = pty.openpty()
    drawn = bytearray()
    reader = threading.Thread(target=read_until_closed, args=(main, drawn))
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        code = {
            "convert": lambda: files.run_convert(big, target, **NO_OPTIONS, options=[]),
            "merge": lambda: files.run_merge([big], target, **NO_OPTIONS),
            "diff": lambda: verification.run_diff(
                big, big, values=True, only_weights=False, weights_only=True, as_json=False
            ),
            "verify": lambda: verification.run_verify(big, weights_only=True, as_json=False),
        }[verb]()
    reader.join(10)
    os.close(main)
    assert code == 0
    doing = {"convert": b"converting", "merge": b"merging", "diff": b"comparing", "verify": b"verifying"}
    assert doing[verb] in drawn
    assert b"B/s" in drawn


NO_OPTIONS: dict[str, Any] = {"to": None, "only_weights": False, "weights_only": True, "as_json": False}


def read_until_closed(terminal: int, drawn: bytearray) -> None:
    with contextlib.suppress(OSError):  # the terminal's way of saying that nobody is on the other side
        while part := os.read(terminal, 1 << 16):
            drawn += part


@pytest.mark.parametrize("verb", ["merge", "convert"])
def test_an_interrupted_rewrite_says_that_nothing_was_written(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "one.ckpt")
    storage.save(source, tensors={"model.w": shard_of(torch.ones(4))}, objects={})

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"nnx_checkpoint.conversion.convert.{verb}", interrupted)
    with pytest.raises(SystemExit) as caught:
        if verb == "merge":
            files.run_merge([source], target, **NO_OPTIONS)
        else:
            files.run_convert(source, target, **NO_OPTIONS, options=[])
    assert caught.value.code == 130
    assert f"'{target}' was not written" in capsys.readouterr().err
