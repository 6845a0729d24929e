"""``nnx ckpt inspect`` and ``nnx ckpt verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import nnx.checkpoint
from nnx.cli.ckpt import app, human_bytes
from nnx.errors import CheckpointError
from nnx.layout import shard_of


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    tensors = {f"model.layers.{i}.weight": torch.zeros(4, 3) for i in (0, 1, 2, 10)}
    tensors |= {
        f"optim.0.state.layers.{i}.weight.{kind}": torch.zeros(4, 3)
        for i in (0, 1)
        for kind in ("exp_avg", "exp_avg_sq")
    }
    tensors["model.step"] = torch.tensor(1)
    nnx.checkpoint.save(
        tmp_path / "a.ckpt",
        tensors={name: shard_of(value) for name, value in tensors.items()},
        objects={
            "optim": [{"groups": [{"params": ["a", "b"], "lr": 0.1, "betas": (0.9, 0.99), "fused": None}]}]
        },
        aliases={"model.head.weight": "model.layers.0.weight"},
        provenance={"strategy": "fsdp_auto", "step": 12},
    )
    return tmp_path / "a.ckpt"


def test_inspect_shows_the_tree_the_optimizer_and_where_it_comes_from(trained: Path) -> None:
    code, output = run("inspect", str(trained))
    assert code == 0
    lines = output.splitlines()
    fields = dict(line.split(":", 1) for line in lines[: lines.index("")] if ":" in line)
    assert fields["provenance strategy"].strip() == "fsdp_auto"
    assert fields["format"].strip() == "1.0"
    assert fields["tensors"].strip() == "9, 97 elements, 392 B"
    assert "optimizer 0: state of 2 parameters: exp_avg (96 B), exp_avg_sq (96 B)" in lines
    assert "optimizer 0, group 0: 2 parameters, lr=0.1" in lines
    tree = lines[lines.index("") + 1 :]
    assert tree == [
        "model  [6 tensors, 200 B]",
        "  head.weight  tied to model.layers.0.weight",
        "  layers  [4 tensors, 192 B]",
        "    0.weight  float32 4x3, 48 B",
        "    1.weight  float32 4x3, 48 B",
        "    2.weight  float32 4x3, 48 B",
        "    10.weight  float32 4x3, 48 B",
        "  step  int64 scalar, 8 B",
        "optim.0.state.layers  [4 tensors, 192 B]",
        "  0.weight  [2 tensors, 96 B]",
        "    exp_avg  float32 4x3, 48 B",
        "    exp_avg_sq  float32 4x3, 48 B",
        "  1.weight  [2 tensors, 96 B]",
        "    exp_avg  float32 4x3, 48 B",
        "    exp_avg_sq  float32 4x3, 48 B",
    ]
    assert run("inspect", str(trained), "--depth", "1")[1].splitlines()[-2:] == [
        "model  [6 tensors, 200 B]",
        "optim.0.state.layers  [4 tensors, 192 B]",
    ]


def test_inspect_prints_json(trained: Path) -> None:
    code, output = run("inspect", str(trained), "--json")
    content = json.loads(output)
    assert code == 0
    assert content["totals"]["bytes"] == 392
    assert content["provenance"] == {"strategy": "fsdp_auto", "step": 12}
    assert content["tensors"]["model.step"] == {"shape": [], "dtype": "int64", "bytes": 8, "pieces": 1}
    assert content["optimizers"] == {"0": {"parameters": 2, "bytes": {"exp_avg": 96, "exp_avg_sq": 96}}}
    assert content["groups"] == [[{"parameters": 2, "options": {"lr": 0.1}}]]
    assert content["aliases"] == {"model.head.weight": "model.layers.0.weight"}


def test_verify_says_that_all_is_well(trained: Path) -> None:
    assert run("verify", str(trained)) == (0, f"{trained}: every byte is as it was written.\n")
    code, output = run("verify", str(trained), "--json")
    assert (code, json.loads(output)) == (0, {"path": str(trained), "whole": True, "damage": []})


def test_verify_lists_damage_and_exits_with_1(trained: Path) -> None:
    (file,) = trained.rglob("r00000.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    code, output = run("verify", str(trained))
    assert code == 1
    assert "r00000.safetensors" in output
    assert "is damaged" in output
    code, output = run("verify", str(trained), "--json")
    (damage,) = json.loads(output)["damage"]
    assert code == 1
    assert damage["stop"] == len(raw)


def test_wrong_usage_exits_with_2(trained: Path) -> None:
    assert run("verify")[0] == 2
    assert run("inspect", str(trained), "--depth", "0")[0] == 2


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        with pytest.raises(CheckpointError, match="is not an nnx checkpoint"):
            run(verb, str(tmp_path))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (2_500_000, "2.50 MB"), (10**13, "10.00 TB")],
)
def test_sizes_are_shown_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_neither_verb_imports_torch(trained: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # importing it would raise
from typer.testing import CliRunner
from nnx.cli.ckpt import app
for verb in ("inspect", "verify"):
    result = CliRunner().invoke(app, [verb, {str(trained)!r}])
    assert result.exit_code == 0, (verb, result.exception)
assert not any(name.startswith("lightning") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_progress_bar_is_drawn_on_a_terminal(trained: Path) -> None:
    import os
    import pty

    main, terminal = pty.openpty()
    code = f"from nnx.cli.ckpt import app; app(['verify', {str(trained)!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=terminal,
        timeout=60,
        check=False,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(terminal)
    drawn = os.read(main, 1 << 16)
    os.close(main)
    assert done.returncode == 0
    assert b"verifying" in drawn
