"""safetensors: single files and Hugging Face directories are read and written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import nnx_checkpoint
from jobs.rich_checkpoint import differences, rich_tensors, save_rich
from nnx_checkpoint.foreign.safetensors_header import read_header
from nnx_core.errors import CheckpointError


def write(
    path: Path, header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None
) -> Path:
    """A file with this header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [5_000_000_000, 10_000])
def test_everything_comes_back_bit_by_bit(tmp_path: Path, limit: int) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors", max_shard_size=limit)
    assert differences(source, nnx_checkpoint.open_checkpoint(tmp_path / "st")) == []
    assert ("model.safetensors.index.json" in {f.name for f in (tmp_path / "st").iterdir()}) == (
        limit < 10**6
    )


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors")
    loaded = load_file(tmp_path / "st" / "model.safetensors")
    expected = {name[6:]: tensor for name, tensor in rich_tensors().items() if name.startswith("model.")}
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        if expected[name].dtype == torch.complex128:  # safetensors has no such type
            tensor = torch.view_as_complex(tensor)
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8) if tensor.dim() else tensor, _bits(expected[name]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def test_several_files_and_their_index_follow_hugging_face(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors", max_shard_size=100)
    index = json.loads((tmp_path / "st" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held = {name: load_file(tmp_path / "st" / file).keys() for file in files for name in [file]}
    assert all(name in held[file] for name, file in index["weight_map"].items())
    total = sum(t.nbytes for name, t in rich_tensors().items() if name.startswith("model."))
    assert index["metadata"]["total_size"] == total
    sizes = {file: (tmp_path / "st" / file).stat().st_size for file in files}
    assert sum(size > 100 + 2000 for size in sizes.values()) == 1  # the one tensor that is larger


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def test_tied_names_go_both_ways_with_the_library(tmp_path: Path) -> None:
    module = Tied()
    save_model(module, str(tmp_path / "a.safetensors"))
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.safetensors")
    assert {*opened.tensors, *opened.aliases} == {"model.a.weight", "model.b.weight"}
    assert len(opened.aliases) == 1
    nnx_checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    other = Tied()
    load_model(other, tmp_path / "b.safetensors")
    assert torch.equal(other.b.weight, module.a.weight)


def test_a_prefix_is_taken_off_and_put_back(tmp_path: Path) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors", prefix="net.")
    assert "weight" in load_file(tmp_path / "st" / "model.safetensors")
    assert "mask" not in load_file(tmp_path / "st" / "model.safetensors")
    assert differences(source, nnx_checkpoint.open_checkpoint(tmp_path / "st")) == []
    with pytest.raises(CheckpointError, match=r"has no weights that begin with 'nett\.'"):
        nnx_checkpoint.convert(tmp_path / "source", tmp_path / "no", to="safetensors", prefix="nett.")


def test_weights_alone_are_nothing_but_weights(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors", save_weights_only=True)
    assert [file.name for file in (tmp_path / "st").iterdir()] == ["model.safetensors"]
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "st/model.safetensors").read_bytes()


def test_one_file_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"holds more.*save_weights_only=True.*or name a directory"):
        nnx_checkpoint.convert(tmp_path / "source", tmp_path / "a.safetensors", save_weights_only=False)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    save_rich(tmp_path / "a")
    with pytest.raises(CheckpointError, match="format 'safetensors' has no option 'speed'"):
        nnx_checkpoint.convert(tmp_path / "a", tmp_path / "b", to="safetensors", speed=3)
    assert not (tmp_path / "b").exists()


# --- reading --------------------------------------------------------------------------------------


def test_every_element_type_of_the_library_is_read_or_named(tmp_path: Path) -> None:
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    names += ["uint64", "uint32", "uint16", "complex64", "float8_e4m3fn", "float8_e5m2"]
    tensors = {name: torch.ones(3, 2).to(getattr(torch, name)) for name in names}
    save_file(tensors, tmp_path / "a.safetensors")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        read = opened.read(f"model.{name}")
        assert read.dtype == tensor.dtype
        assert torch.equal(_bits(read), _bits(tensor))
    save_file({"x": torch.ones(2).to(torch.float8_e4m3fnuz)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'model\.x'.*F8_E4M3FNUZ, which is not supported"):
        nnx_checkpoint.open_checkpoint(tmp_path / "b.safetensors")


def test_a_directory_with_one_file_of_any_name_is_opened(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "pytorch_lora_weights.safetensors")
    assert nnx_checkpoint.open_checkpoint(tmp_path).format == "safetensors"
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of a known format"):
        nnx_checkpoint.open_checkpoint(tmp_path)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert nnx_checkpoint.open_checkpoint(tmp_path).read("model.w").tolist() == [0, 0]


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "is not a valid safetensors file: its header is not valid"),
        (b"[1, 2]", b"", "its header is not valid"),
        (b'{"a": ' * 100000, b"", "its header is not valid"),
        (b'{"a": 1, "a": 1}', b"", "a name occurs twice"),
        ({"a": {**F32, "data_offsets": [0, 12]}}, bytes(12), r"shape \[2\] has 12 bytes"),
        ({"a": {**F32, "shape": [-2]}}, bytes(8), "not natural numbers"),
        ({"a": {**F32, "shape": [2.0]}}, bytes(8), "not natural numbers"),
        ({"a": {**F32, "data_offsets": [0]}}, bytes(8), "its header is not valid"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12), "tensor 'b' overlaps another"),
        ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20), "tensor 'b' leaves a gap before it"),
        ({"a": F32}, bytes(4), r"is truncated: it has \d+ bytes, expected \d+"),
        ({"a": F32}, bytes(9), "its tensors end at"),
        (
            {"__metadata__": {"x": {"y": "z"}}, "a": F32},
            bytes(8),
            "its metadata has values that are not text",
        ),
        ({"a": {**F32, "dtype": "F7"}}, bytes(8), "element type F7, which is not supported"),
        (
            {"__metadata__": {"nnx.complex": '{"a": "complex128"}'}, "a": F32},
            bytes(8),
            "its header is not valid",
        ),
    ],
)
def test_headers_that_cannot_be_true_are_refused(
    tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, message: str
) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"a\.safetensors' .*{message}|{message}"):
        nnx_checkpoint.open_checkpoint(path)


def test_headers_of_impossible_length_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": F32}, bytes(8), length=1 << 40)
    with pytest.raises(CheckpointError, match=r"its header would have 1099511627776 bytes"):
        read_header(path)
    (tmp_path / "b.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"it has 4 bytes"):
        read_header(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"'.*c\.safetensors' is missing"):
        read_header(tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing file", r"model-00002-of-\d+\.safetensors' is missing"),
        ("missing tensor", r"lacks tensor 'nowhere', which the index lists"),
        ("outside", r"names files outside its directory"),
        ("not json", r"index\.json' is malformed"),
        ("no map", r"index\.json' is malformed"),
        ("twice", r"holds tensor 'model\.net\.weight' twice"),
        ("state missing", r"training_state\.safetensors' is missing"),
        ("state malformed", r"training_state\.json' holds malformed data"),
        ("state pickle", r"training_state\.json' is malformed: LookupError: .*'x' is missing"),
    ],
)
def test_directories_that_are_damaged_are_named(tmp_path: Path, damage: str, message: str) -> None:
    save_rich(tmp_path / "source")
    place = tmp_path / "st"
    nnx_checkpoint.convert(tmp_path / "source", place, to="safetensors", max_shard_size=100)
    index = place / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    files = sorted(set(body["weight_map"].values()))
    if damage == "missing file":
        (place / files[1]).unlink()
    elif damage == "missing tensor":
        body["weight_map"]["nowhere"] = files[0]
    elif damage == "outside":
        body["weight_map"]["nowhere"] = "../model.safetensors"
    elif damage == "twice":
        header = {"net.weight": F32, "more": {**F32, "data_offsets": [8, 16]}}
        write(place / "copy.safetensors", header, bytes(16))
        body["weight_map"]["more"] = "copy.safetensors"
    elif damage == "state missing":
        (place / "training_state.safetensors").unlink()
    elif damage == "state malformed":
        (place / "training_state.json").write_text('{"version": 1}')
    elif damage == "state pickle":
        text = json.loads((place / "training_state.json").read_text())
        text["objects"] = {"trainer": {"$": "opaque", "place": "x"}}
        (place / "training_state.json").write_text(json.dumps(text))
    index.write_text({"not json": "{", "no map": "{}"}.get(damage, json.dumps(body)))
    with pytest.raises(CheckpointError, match=message):
        nnx_checkpoint.open_checkpoint(place)
