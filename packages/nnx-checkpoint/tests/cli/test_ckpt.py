"""Tests of ``nnx ckpt inspect`` and ``verify``, and of the behaviour that all verbs share."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.cli.content import plain
from nnx_checkpoint.cli.inspection import sizes_by_module
from nnx_checkpoint.cli.output import human_bytes
from nnx_checkpoint.format.codec import Encoder
from nnx_checkpoint.format.index import TensorEntry
from nnx_core.errors import CheckpointError, UnsupportedError


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


class Color(enum.Enum):
    RED = 1


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    tensors = {f"model.layers.{i}.weight": torch.zeros(4, 3) for i in (0, 1, 2, 10)}
    tensors |= {
        f"optim.0.state.layers.{i}.weight.{kind}": torch.zeros(4, 3)
        for i in (0, 1)
        for kind in ("exp_avg", "exp_avg_sq")
    }
    tensors["model.step"] = torch.tensor(1)
    nnx_checkpoint.save(
        tmp_path / "a.ckpt",
        tensors={name: shard_of(value) for name, value in tensors.items()},
        objects={
            "optim": [{"groups": [{"params": ["a", "b"], "lr": 0.1, "betas": (0.9, 0.99), "fused": None}]}],
            "trainer": {
                "epoch": 2,
                "global_step": 12,
                "hyper_parameters": {"width": 3, "when": float("inf")},
                "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": 0.5}, "Timer": {}},
            },
        },
        rank_objects={"rng": {"python": 1, "torch": (1, 2)}, "data": 7, "none": None},
        aliases={"model.head.weight": "model.layers.0.weight"},
        provenance={"strategy": "fsdp_auto", "step": 12},
    )
    return tmp_path / "a.ckpt"


def test_inspect_shows_the_tree_the_optimizer_and_where_it_comes_from(trained: Path) -> None:
    code, output = run("inspect", str(trained))
    assert code == 0
    lines = output.splitlines()
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    assert fields["provenance strategy"] == "fsdp_auto"
    assert re.fullmatch(r"nnx 1\.\d+", fields["format"])
    assert fields["tensors"] == "9, 97 elements, 392 B"
    assert (fields["epoch"], fields["step"], fields["world size"]) == ("2", "12", "1")
    assert fields["hyper-parameters"] == "width=3, when=inf"
    assert fields["callbacks"] == "ModelCheckpoint, Timer"
    assert fields["rank state"] == "of 1 rank: rng (python, torch), data"
    assert "optimizer 0: state of 2 parameters: exp_avg (96 B), exp_avg_sq (96 B)" in lines
    assert "optimizer 0, group 0: 2 parameters, lr=0.1, betas=[0.9, 0.99]" in lines
    by_kind = lines.index("bytes by kind")
    by_module = lines.index("bytes by module (█ weights, ░ optimizer state)")
    assert lines[by_kind + 1].split() == ["weights", "█" * 32, "200", "B"]
    assert lines[by_kind + 2].split() == ["optimizer", "0", "exp_avg", "█" * 15, "96", "B"]
    assert lines[by_module + 1].split() == ["layers.0", "█" * 11 + "░" * 21, "144", "B"]
    assert lines[by_module + 5].split() == ["step", "█" * 2, "8", "B"]
    tree = lines[-15:]
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
    options = {"lr": 0.1, "betas": [0.9, 0.99], "fused": None}
    assert content["groups"] == [[{"parameters": 2, "options": options}]]
    assert (content["format"], content["version"][0], content["world_size"]) == ("nnx", 1, 1)
    assert (content["epoch"], content["step"]) == (2, 12)
    assert content["trainer"]["callbacks"]["Timer"] == {}
    ranks = {"rng": {"python": 1, "torch": [1, 2]}, "data": 7, "none": None}
    assert content["rank_state"] == {"ranks": 1, "first": ranks}
    assert content["bytes_by_kind"] == {
        "weights": 200,
        "optimizer 0 exp_avg": 96,
        "optimizer 0 exp_avg_sq": 96,
    }
    assert {"module": "layers.0", "weights": 48, "optimizer": 96} in content["bytes_by_module"]
    assert sum(content["files"].values()) == content["totals"]["bytes_on_disk"]
    assert content["aliases"] == {"model.head.weight": "model.layers.0.weight"}


def test_verify_says_that_all_is_well(trained: Path) -> None:
    assert run("verify", str(trained)) == (0, f"{trained}: OK: all checksums match.\n")
    code, output = run("verify", str(trained), "--json")
    assert code == 0
    assert json.loads(output) == {
        "path": str(trained),
        "whole": True,
        "format": "nnx",
        "checksums": True,
        "damage": [],
    }


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
        with pytest.raises(CheckpointError, match="is not a checkpoint of a known format"):
            run(verb, str(tmp_path))
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            run(verb, str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        run("diff", str(tmp_path / "nothing"), str(tmp_path / "nothing"))
    for verb in ("ls", "gc"):
        with pytest.raises(CheckpointError, match="there is nothing at"):
            run(verb, str(tmp_path / "nothing"))


@pytest.mark.full
def test_sizes_are_drawn_into_a_picture(trained: Path, tmp_path: Path) -> None:
    code, _ = run("inspect", str(trained), "--plot", str(tmp_path / "sizes.svg"))
    drawn = (tmp_path / "sizes.svg").read_text()
    assert code == 0
    assert drawn.count("<!-- layers.0 -->") == 1
    assert "<!-- optimizer 0 exp_avg -->" in drawn
    for wrong in (tmp_path / "no" / "sizes.png", tmp_path / "sizes.unknown"):
        with pytest.raises(CheckpointError, match="cannot write the image") as caught:
            run("inspect", str(trained), "--plot", str(wrong))
        assert ".png" in caught.value.remedy


def test_without_matplotlib_a_picture_says_what_to_install(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="matplotlib is not installed") as caught:
        run("inspect", str(trained), "--plot", str(tmp_path / "sizes.png"))
    assert caught.value.remedy == "Run `pip install 'nnx-core[plot]'`."


def test_many_numbered_modules_are_shown_as_one() -> None:
    names = [f"model.blocks.{i}.{part}.weight" for i in range(20) for part in ("attention", "mlp")]
    entries = {name: TensorEntry(name, (2,), "float32", ()) for name in names}
    entries["model.few.0.weight"] = TensorEntry("model.few.0.weight", (2,), "float32", ())
    assert [(size.name, size.weights) for size in sizes_by_module(entries)] == [
        ("blocks.*.attention", 160),
        ("blocks.*.mlp", 160),
        ("few.0", 8),
    ]
    wide = {f"model.part{i}": TensorEntry(f"model.part{i}", (2,), "float32", ()) for i in range(100)}
    assert [size.name for size in sizes_by_module(wide)] == ["(all)"]


def test_values_of_every_type_are_shown_plainly() -> None:
    values = {
        "tuple": (1, float("nan")),
        "keys": {1: "a"},
        "bytes": b"abc",
        "path": Path("here"),
        "dtype": torch.bfloat16,
        "long": 1 << 5000,
        "number": np.float32(0.5),
        "array": np.zeros((2, 3)),
        "complex": 1 + 2j,
        "set": {3},
        "kind": Color.RED,
        "tensor": torch.zeros(2),
        "namespace": Namespace(a=1),
        "size": torch.Size([2]),
    }
    assert plain(Encoder("objects").encode(values)) == {
        "tuple": [1, "nan"],
        "keys": {"1": "a"},
        "bytes": "3 bytes",
        "path": "here",
        "dtype": "torch.bfloat16",
        "long": 1 << 5000,
        "number": 0.5,
        "array": "array of 2x3 <f8",
        "complex": "[1.0, 2.0]",
        "set": [3],
        "kind": "Color.RED",
        "tensor": "tensor objects.tensor",
        "namespace": {"a": 1},
        "size": [2],
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (2_500_000, "2.50 MB"), (10**13, "10.00 TB")],
)
def test_sizes_are_shown_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_looking_at_our_own_format_never_imports_torch(trained: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # importing it would raise
from typer.testing import CliRunner
from nnx_checkpoint.cli.command import app
for verb in ("inspect", "verify", "ls", "gc"):
    result = CliRunner().invoke(app, [verb, {str(trained)!r}])
    assert result.exit_code == 0, (verb, result.exception)
for verb in ("ls", "gc"):
    result = CliRunner().invoke(app, [verb, {str(trained.parent)!r}])
    assert result.exit_code == 0, (verb, result.exception)
assert not any(name.startswith("lightning") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
