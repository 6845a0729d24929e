"""The ``--json`` output of every command matches its schema."""

from __future__ import annotations

import json
import os
import shutil
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from typer.testing import CliRunner

from nnx_checkpoint import convert
from nnx_checkpoint.cli.command import _application, main
from nnx_conformance.report import Report, Result, Verdict
from nnx_core.cli.schema import documented, schema_of

Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command with --json in this process; return its exit code, and its validated output."""

    def run(schema: str, *arguments: str) -> tuple[int, Any]:
        monkeypatch.setattr(sys, "argv", ["nnx", *schema.split(), *arguments, "--json"])
        with pytest.raises(SystemExit) as caught:
            main()
        content = json.loads(capsys.readouterr().out)
        validate(schema, content)
        return int(caught.value.code or 0), content

    return run


def validate(schema: str, content: Any) -> None:
    validator = Draft202012Validator(schema_of(schema))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of nnx checkpoints: one, another with other tensors, and a damaged one."""
    folder = tmp_path_factory.mktemp("schemas")
    weights = {
        "one": {"up.weight": torch.ones(4, 3), "up.bias": torch.ones(4), "one": torch.ones(1)},
        "other": {"up.weight": torch.ones(5, 3), "up.bias": torch.zeros(4), "norm": torch.ones(1)},
    }
    for name, tensors in weights.items():
        save_file(tensors, folder / f"{name}.safetensors")
        convert(folder / f"{name}.safetensors", folder / "runs" / f"{name}.ckpt", to="nnx")
    shutil.copytree(folder / "runs" / "one.ckpt", folder / "runs" / "damaged.ckpt")
    shard = next((folder / "runs" / "damaged.ckpt").glob("*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return folder


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_every_command_that_prints_json_has_a_schema_and_the_others_have_none() -> None:
    commands: dict[str, Any] = dict(typer.main.get_command(_application([])).commands)  # type: ignore[attr-defined]
    of_checkpoints = typer.main.get_command(_application(["ckpt"])).commands["ckpt"].commands  # type: ignore[attr-defined]
    commands |= {f"ckpt {name}": command for name, command in of_checkpoints.items()}
    assert {name for name, command in commands.items() if "--json" in options_of(command)} == set(
        documented()
    )


@pytest.mark.parametrize("name", documented())
def test_a_schema_is_valid_names_its_command_and_allows_no_other_keys(name: str) -> None:
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["title"].startswith(f"nnx {name} ")
    shapes = [schema, *schema.get("oneOf", []), *schema.get("$defs", {}).values()]
    assert all(shape["additionalProperties"] is False for shape in shapes if shape.get("type") == "object")


def test_a_schema_notices_a_key_that_it_does_not_know(printed: Command) -> None:
    _, content = printed("doctor")
    content["weather"] = "fine"
    with pytest.raises(AssertionError, match="'weather' was unexpected"):
        validate("doctor", content)


@pytest.mark.usefixtures("clean_names")
@pytest.mark.full
def test_schemas_of_the_commands_about_names(printed: Command, site: Any) -> None:
    site.add("bb-broken", "import does_not_exist")
    site.add("nnx-deepspeed", "import does_not_exist")
    site.hide("nnx-fairscale")
    code, content = printed("list", "--all")
    assert code == 0
    assert {row["status"] for row in content["strategies"]} == {
        "installed", "not installed", "broken", "historical",
    }  # fmt: skip
    shown = {name: printed("show", name) for name in ("fsdp_auto", "fairscale_fsdp", "horovod", "ddp")}
    assert {name: code for name, (code, _) in shown.items()} == dict.fromkeys(shown, 0)
    assert printed("show", "nnx_deepspeed_1")[1]["status"] == "broken"
    assert printed("doctor")[0] == 1
    assert printed("search", "offload")[1]["results"]
    assert printed("search", "fspd") == (1, {"words": ["fspd"], "results": [], "suggestions": ["fsdp"]})


def test_schemas_of_the_commands_about_checkpoints(printed: Command, folder: Path) -> None:
    one, other, damaged = (str(folder / "runs" / f"{name}.ckpt") for name in ("one", "other", "damaged"))
    assert len(printed("ckpt ls", str(folder / "runs"))[1]["checkpoints"]) == 3
    for path in (one, str(folder / "one.safetensors")):
        assert printed("ckpt inspect", path)[1]["totals"]["tensors"] == 3
        assert printed("ckpt verify", path)[0] == 0
    code, content = printed("ckpt verify", damaged)
    assert (code, len(content["damage"])) == (1, 1)
    code, content = printed("ckpt diff", one, other)
    assert code == 1
    assert all(content[key] for key in ("only_left", "only_right", "shapes", "values"))
    assert printed("ckpt merge", one, str(folder / "m.safetensors"))[1]["format"] == "safetensors"
    assert printed("ckpt convert", one, str(folder / "c.ckpt"), "--to", "nnx")[1]["format"] == "nnx"


def test_schema_of_a_garbage_collection(printed: Command, tmp_path: Path) -> None:
    killed = tmp_path / "last.ckpt" / "20261121T143506.500000-0a1b2c3d"
    killed.mkdir(parents=True)
    (killed / "r00000.safetensors").write_bytes(bytes(9))
    for path in (killed / "r00000.safetensors", killed):  # a newer one may be a copy in progress
        os.utime(path, (0, 0))
    code, content = printed("ckpt gc", str(tmp_path), "--dry-run")
    assert code == 0
    assert content["removed"]


def test_schema_of_the_conformance_checks(printed: Command) -> None:
    assert len(printed("conformance", "--list")[1]) > 40


@pytest.mark.parametrize("verdict", typing.get_args(Verdict))
def test_schema_of_a_conformance_report(verdict: Verdict) -> None:
    result = Result("losses", "numbers", "they are equal", verdict, "why", 0.1, "Traceback")
    report = Report("tiny", "backend", "nnx-tiny 0.1.0", "a:B", "fast", {"torch": "2.13.0"}, [result], 0.1)
    validate("conformance", json.loads(json.dumps(report.as_dict())))


def test_schema_of_a_new_project(printed: Command, tmp_path: Path) -> None:
    pytest.importorskip("copier")
    code, content = printed("new", str(tmp_path / "mine"), "--defaults")
    assert (code, content["strategy"]) == (0, "mine")


def test_the_command_prints_which_schemas_there_are_and_each_of_them() -> None:
    app = _application([])
    listed = CliRunner().invoke(app, ["schema"])
    assert [line.split("  ")[0] for line in listed.stdout.splitlines()[1:]] == [
        f"nnx {name}" for name in documented()
    ]
    for words in (["ckpt", "inspect"], ["nnx", "ckpt", "inspect"]):
        done = CliRunner().invoke(app, ["schema", *words])
        assert (done.exit_code, json.loads(done.stdout)) == (0, schema_of("ckpt inspect"))


def test_a_schema_that_does_not_exist_is_wrong_usage() -> None:
    done = CliRunner().invoke(_application([]), ["schema", "weather"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: there is no schema of 'weather'.\nremedy: Choose one of 'choose', 'ckpt convert', "
    )
