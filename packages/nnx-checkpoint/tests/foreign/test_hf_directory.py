"""Directories of Hugging Face: `from_pretrained` reads what is written, and what it writes is read."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nnx_checkpoint
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.foreign import hf_plan
from nnx_core.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="its models are the judge")

from jobs.hf_models import CONFIGS, Held, Lit, build, logits, save_config  # noqa: E402

NET = [["net.**", "**"], ["scale", None]]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of GPT-2 as an attribute of a module, with an optimizer."""
    return save_trained(build("gpt2"), tmp_path)


def save_trained(model: Any, tmp_path: Path) -> Path:
    held = Held(model)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1, momentum=0.9)
    nnx_checkpoint.save(tmp_path / "run.ckpt", model=held, optimizer=optimizer, step=3)
    save_config(model, tmp_path / "config")
    return tmp_path / "run.ckpt"


def convert(tmp_path: Path, **options: Any) -> Path:
    options = {"config": tmp_path / "config", **options}
    nnx_checkpoint.convert(tmp_path / "run.ckpt", tmp_path / "out", to="hf", **options)
    return tmp_path / "out"


def same(left: Path, right: Path) -> bool:
    opened = [nnx_checkpoint.open_checkpoint(path) for path in (left, right)]
    return nnx_checkpoint.compare(*opened).same


def refused(tmp_path: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path, **options)
    assert not (tmp_path / "out").exists()


def edit_config(tmp_path: Path, **entries: Any) -> None:
    file = tmp_path / "config" / "config.json"
    content = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


# Writing.


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "bert", *(pytest.param(k, marks=pytest.mark.full) for k in ("llama", "qwen3", "mixtral"))],
)
def test_from_pretrained_computes_the_same_and_the_way_back_loses_nothing(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    save_trained(model, tmp_path)
    out = convert(tmp_path, max_shard_size=6000)
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = getattr(transformers, CONFIGS[kind][0]).from_pretrained(out)
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert (out / "tokenizer.json").read_text() == "{}"
    nnx_checkpoint.convert(out, tmp_path / "back.ckpt")
    assert same(tmp_path / "run.ckpt", tmp_path / "back.ckpt")


def test_names_are_those_of_save_pretrained(trained: Path, tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "theirs")
    out = convert(tmp_path, names=NET, save_weights_only=True)
    assert sorted(file.name for file in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    ours, theirs = (nnx_checkpoint.open_checkpoint(path) for path in (out, tmp_path / "theirs"))
    assert {name.replace("model.net.", "model.") for name in ours.tensors} == set(theirs.tensors)


def test_the_command_line_writes_and_reads(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(NET))
    config = ["--config", str(tmp_path / "config")]
    result = CliRunner().invoke(app, ["convert", str(trained), str(tmp_path / "out"), "--to", "hf", *config])
    assert result.exit_code == 0, result.output
    assert "out: hf, " in result.stdout
    shutil.copytree(tmp_path / "config", tmp_path / "hub")
    build("gpt2").save_pretrained(tmp_path / "hub")
    names = ["-i", f"names={tmp_path / 'names.json'}"]
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "hub"), str(tmp_path / "a.ckpt"), *names])
    assert result.exit_code == 0, result.output
    held = Held(build("gpt2"))
    with torch.no_grad():
        held.net.transformer.wte.weight.zero_()
    nnx_checkpoint.load(tmp_path / "a.ckpt", model=held, strict=False)
    assert torch.equal(logits(held.net), logits(build("gpt2")))


def test_the_weights_type_goes_into_the_configuration(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(tmp_path, dtype="float16")
    with caplog.at_level(logging.WARNING, logger="nnx.checkpoint"):
        out = convert(tmp_path)
    assert "Writing dtype float32 into config.json, not float16" in caplog.text
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
    assert torch.equal(logits(loaded), logits(build("gpt2")))


def test_files_with_code_and_other_weights_are_not_copied(trained: Path, tmp_path: Path) -> None:
    for name in ("modeling.py", "model.safetensors.index.json", "vocab.txt", "pytorch_model.bin", ".x.json"):
        (tmp_path / "config" / name).write_text("{}")
    out = convert(tmp_path)
    assert sorted(file.name for file in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json"),
        *("training_state.json", "training_state.safetensors", "vocab.txt"),
    ]


def test_a_directory_is_its_own_configuration(trained: Path, tmp_path: Path) -> None:
    out = convert(tmp_path)
    nnx_checkpoint.convert(out, tmp_path / "again", to="hf", max_shard_size=9000)
    assert same(out, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").exists()


def test_weights_that_the_class_does_not_tie_are_written_under_both_names(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    save_trained(model, tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(convert(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_tied_weights_that_are_stored_twice_must_be_equal(value: float, tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone() + value
    save_trained(model, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    if value:
        refused(
            tmp_path, r"'net\.model\.embed_tokens\.weight' and 'net\.lm_head\.weight' have different values"
        )
        return
    loaded = transformers.LlamaForCausalLM.from_pretrained(convert(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))


# Refusals before anything is written.


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["net.**", "**"]], r"has no rule for 'scale'.*leave it out with \[\"scale\", null\]"),
        (
            [["net.transformer.wte.**", "x"], *NET],
            r"sides of \['net\.transformer\.wte\.\*\*', 'x'\] have diff",
        ),
        ([["scale", "lm_head.weight"], *NET], r"gives 'lm_head\.weight' to two tensors"),
        ([["net.lm_head.weight", "lm_head.weight"], ["**", None]], r"missing: transformer\.wpe\.weight"),
        ([["scale", "scale"], *NET], r"left over: scale"),
        ([["net.**", "net.**"], ["scale", None]], r"missing: .*; left over: net\."),
        ("gpt5", r"there is no map of names 'gpt5'.*one of bert, gpt2, llama"),
        ("gone.json", r"'gone\.json' cannot be read"),
        ({"net.**": "**"}, r"is malformed: it is dict"),
    ],
)
def test_maps_that_do_not_fit_are_refused(trained: Path, tmp_path: Path, names: Any, message: str) -> None:
    refused(tmp_path, message, names=names)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"n_embd": 32},
            r"of another shape: transformer\.wte\.weight is \(37, 16\) and should be \(37, 32\)",
        ),
        ({"n_layer": 3}, r"GPT2LMHeadModel has 12 tensors that it lacks, such as transformer\.h\.2\."),
        ({"n_layer": 1}, r"left over: transformer\.h\.1\."),
        ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM"),
        ({"architectures": None}, r"does not name the class of the model"),
        ({"architectures": ["Nonesuch"]}, r"has no class 'Nonesuch'"),
        ({"architectures": ["GPT2Config"]}, r"has no class 'GPT2Config'"),
        ({"n_embd": "wide"}, r"builds no GPT2LMHeadModel from"),
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
            r"trust_remote_code\), which nnx does not exec",
        ),
    ],
)
def test_other_configurations_are_refused(
    trained: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    edit_config(tmp_path, **entries)
    refused(tmp_path, message)


def test_code_of_the_directory_is_not_executed_and_a_map_is_enough(trained: Path, tmp_path: Path) -> None:
    edit_config(
        tmp_path, auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}, model_type="new"
    )
    (tmp_path / "config" / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    refused(tmp_path, "does not execute.*-o names=map.json")
    out = convert(tmp_path, names=NET)
    nnx_checkpoint.convert(out, tmp_path / "back.ckpt")
    assert same(trained, tmp_path / "back.ckpt")
    assert not (tmp_path / "executed").exists() and not (out / "code.py").exists()


def test_without_transformers_a_map_is_needed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_plan, "is_installed", lambda: False)
    refused(tmp_path, r"transformers, which knows its names, is not installed.*pip install transformers")
    out = convert(tmp_path, names=NET)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
    assert torch.equal(logits(loaded), logits(build("gpt2")))


def test_a_configuration_is_needed(trained: Path, tmp_path: Path) -> None:
    refused(tmp_path, r"needs the configuration of the model.*--config", config=None)
    refused(tmp_path, r"there is no configuration 'gpt2'.*not a name of the hub", config="gpt2")
    (tmp_path / "config" / "config.json").write_text("[]")
    refused(tmp_path, r"is no configuration of a model: it is a list")


def test_targets_that_exist_are_not_touched(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["precious"]


def test_weights_without_a_place_are_not_dropped(trained: Path, tmp_path: Path) -> None:
    refused(tmp_path, r"scale of '.*run\.ckpt' have no place in the directory", save_weights_only=True)


def test_two_models_in_one_module_are_told_apart(tmp_path: Path) -> None:
    pair = torch.nn.ModuleDict({"student": build("gpt2"), "teacher": build("gpt2")})
    nnx_checkpoint.save(tmp_path / "run.ckpt", model=pair)
    save_config(build("gpt2"), tmp_path / "config")
    refused(tmp_path, r"has 2 models of class GPT2LMHeadModel, under 'student\.', 'teacher\.'")
    out = convert(tmp_path, names=[["student.**", "**"], ["**", None]])
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
    assert torch.equal(logits(loaded), logits(pair["student"]))
    nnx_checkpoint.convert(out, tmp_path / "back.ckpt")
    assert same(tmp_path / "run.ckpt", tmp_path / "back.ckpt")


# Reading.


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A directory that `save_pretrained` wrote, in several files."""
    build("gpt2").save_pretrained(tmp_path / "hub", max_shard_size="6KB")
    return tmp_path / "hub"


def zeroed(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def test_a_directory_of_others_is_loaded_into_a_module_that_holds_the_model(hub: Path) -> None:
    assert nnx_checkpoint.open_checkpoint(hub).format == "hf"
    for module in (
        zeroed(build("gpt2")),
        zeroed(Lit("gpt2")),
        torch.nn.ModuleDict({"x": zeroed(Lit("gpt2"))}),
    ):
        nnx_checkpoint.load(hub, model=module)
        (net,) = [part for part in module.modules() if isinstance(part, transformers.GPT2LMHeadModel)]
        assert torch.equal(logits(net), logits(build("gpt2")))


def test_two_places_for_one_model_are_refused(hub: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fits 2 parts of the module: a\., b\..*model=module\.part"):
        nnx_checkpoint.load(hub, model=torch.nn.ModuleDict({"a": build("gpt2"), "b": build("gpt2")}))


def test_a_model_of_other_sizes_is_refused(hub: Path) -> None:
    with pytest.raises(CheckpointError, match=r"net\.transformer\.h\.2\.attn"):
        nnx_checkpoint.load(hub, model=torch.nn.ModuleDict({"net": build("gpt2", n_layer=3)}))


def test_old_names_of_the_hub_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for kind, model in (("gpt2", build("gpt2")), ("bert", build("bert"))):
        model.save_pretrained(tmp_path / kind)
        file = tmp_path / kind / "model.safetensors"
        tensors = {
            name.removeprefix("transformer.")
            .replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in load_file(file).items()
        }
        old = (
            {"h.0.attn.bias": torch.ones(1)}
            if kind == "gpt2"
            else {"bert.embeddings.position_ids": torch.ones(1)}
        )
        save_file({**tensors, **old}, file)
        again = zeroed(build(kind))
        nnx_checkpoint.load(tmp_path / kind, model=torch.nn.ModuleDict({"net": again}))
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no shard", r"not complete: 2 of the \d files in the index are missing, the first is 'model-00001"),
        ("no index", r"not complete: 'model-00001-of-.*' is there, and the index .* is missing"),
        ("pointer", r"'model-00002-of-.*' is a pointer of Git LFS.*git lfs pull"),
        ("truncated", r"model-00002-of-.* is truncated"),
        ("foreign", r"model-00009-of-00009\.safetensors' does not belong.*does not name it"),
        ("foreign beside one", r"'model\.safetensors' has all weights"),
        ("config", r"is no configuration of a model"),
        ("names", r"map of names in the files is malformed"),
    ],
)
def test_directories_that_are_not_whole_are_refused(hub: Path, damage: str, message: str) -> None:
    shards = sorted(hub.glob("model-*.safetensors"))
    if damage == "no shard":
        shards[0].unlink()
        shards[2].unlink()
    elif damage == "no index":
        (hub / "model.safetensors.index.json").unlink()
    elif damage == "pointer":
        shards[1].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif damage == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-1])
    elif damage == "foreign":
        shutil.copy(shards[0], hub / "model-00009-of-00009.safetensors")
    elif damage == "foreign beside one":
        (hub / "model.safetensors.index.json").unlink()
        shutil.copy(shards[0], hub / "model.safetensors")
    elif damage == "config":
        (hub / "config.json").write_text("{")
    elif damage == "names":
        from safetensors.torch import load_file, save_file

        save_file(load_file(shards[0]), shards[0], {"nnx.names": "{"})
    with pytest.raises(CheckpointError, match=message):
        nnx_checkpoint.open_checkpoint(hub)


def test_options_of_another_format_are_refused(hub: Path, trained: Path) -> None:
    with pytest.raises(CheckpointError, match=r"format 'hf', which has no option 'tag'.*options are: names"):
        nnx_checkpoint.open_checkpoint(hub, tag="x")
    with pytest.raises(CheckpointError, match=r"format 'nnx', which has no option 'names'.*are: none"):
        nnx_checkpoint.open_checkpoint(trained, names="x")
