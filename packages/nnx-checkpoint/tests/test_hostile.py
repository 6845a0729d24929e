"""Checkpoints with right checksums and malicious content raise one clear error at once."""

from __future__ import annotations

import dataclasses
import json
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import nnx_checkpoint
from nnx_base.box import Box, find_fault
from nnx_base.shard import shard_of
from nnx_checkpoint.cli.output import printable
from nnx_checkpoint.conversion.comparison import compare
from nnx_checkpoint.foreign.contents import Contents
from nnx_checkpoint.foreign.extras import unpack
from nnx_checkpoint.format.manifest import MANIFEST, _sign, digest
from nnx_checkpoint.reading.naming import FABRIC_KEYS
from nnx_core import load_from_checkpoint
from nnx_core.errors import CheckpointError

_SIGNED = len(b'{\n "digest": "') + 32


def save(path: Path) -> Path:
    objects = {"trainer": {"epoch": 1}, "optim": [], "extra": {}}
    nnx_checkpoint.save(path, tensors={"model.w": shard_of(torch.ones(3))}, objects=objects)
    return path


def sign(path: Path, text: str) -> None:
    """Write a manifest as its owner would: its digest is right."""
    body = b'{\n "digest": "' + b"0" * 32 + b'",' + text[1:].encode() + b"\n"
    (path / MANIFEST).write_bytes(_sign(body))


def alter_manifest(path: Path, alter: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads((path / MANIFEST).read_bytes())
    del body["digest"]
    alter(body)
    sign(path, json.dumps(body, indent=1))


def replace(path: Path, name: str, data: bytes) -> None:
    """Replace a file of the save, with the right size and digest in the manifest."""
    save_id = json.loads((path / MANIFEST).read_bytes())["save_id"]
    (path / save_id / name).write_bytes(data)
    entry = {"size": len(data), "digest": digest(data), "digested": len(data)}
    alter_manifest(path, lambda body: body["files"].update({name: entry}))


@pytest.mark.parametrize("ranks", [10**12, 0, -1, "abc", None, [1], 1e400, True])
def test_no_number_of_ranks_is_believed_that_nobody_has(tmp_path: Path, ranks: Any) -> None:
    path = save(tmp_path / "a.ckpt")
    alter_manifest(path, lambda body: body["writer"].update(world_size=ranks))
    with pytest.raises(CheckpointError, match="is damaged"):
        nnx_checkpoint.open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"created"', '"created": "twice",\n "created"'),
        lambda text: text.replace('"block": 262144', '"block": NaN'),
        lambda text: "\ufeff" + text,
    ],
)
def test_json_is_strict(tmp_path: Path, change: Callable[[str], str]) -> None:
    path = save(tmp_path / "a.ckpt")
    text = "{" + (path / MANIFEST).read_text()[_SIGNED + 2 :].rstrip("\n")
    sign(path, text)
    nnx_checkpoint.open_checkpoint(path)  # as it was
    sign(path, change(text))
    with pytest.raises(CheckpointError):
        nnx_checkpoint.open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"weight_map": {', '"weight_map": {"a": "x", '),
        lambda text: text.replace('"total_size": ', '"total_size": NaN, "x": '),
        lambda text: text.encode().decode("latin-1").encode("utf-16").decode("latin-1"),
    ],
)
def test_the_json_of_other_programs_is_strict_too(tmp_path: Path, change: Callable[[str], str]) -> None:
    nnx_checkpoint.save(
        tmp_path / "a.ckpt", tensors={f"model.{name}": shard_of(torch.ones(99)) for name in "ab"}, objects={}
    )
    nnx_checkpoint.convert(tmp_path / "a.ckpt", tmp_path / "st", to="safetensors", max_shard_size=400)
    nnx_checkpoint.open_checkpoint(tmp_path / "st")  # as it was
    file = tmp_path / "st" / "model.safetensors.index.json"
    file.write_bytes(change(file.read_text()).encode("latin-1"))
    with pytest.raises(CheckpointError, match="malformed"):
        nnx_checkpoint.open_checkpoint(tmp_path / "st")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "deque", "items": [], "maxlen": 2**70},
        {"$": "float", "value": 10**400},
        {"$": "complex", "value": [10**400, 0]},
        {"$": "numpy.array", "dtype": "(3,", "shape": [1], "data": ""},
        {"$": "numpy.array", "dtype": "<f4", "shape": [2**70], "data": ""},
        {"$": "unknown"},
        {"$": "int", "value": "zz"},
    ],
)
def test_values_that_cannot_be_are_malformed(tmp_path: Path, value: Any) -> None:
    path = save(tmp_path / "a.ckpt")
    replace(path, "objects.json", json.dumps({"trainer": {"x": value}, "optim": []}).encode())
    with pytest.raises(CheckpointError, match="is malformed"):
        _ = nnx_checkpoint.open_checkpoint(path).objects


@pytest.mark.parametrize("optimizers", [5, [5], [{"groups": [5]}], [{"values": {}}]])
def test_optimizers_that_cannot_be_are_malformed(tmp_path: Path, optimizers: Any) -> None:
    path = save(tmp_path / "a.ckpt")
    replace(path, "objects.json", json.dumps({"trainer": {}, "optim": optimizers}).encode())
    with pytest.raises(CheckpointError, match="is malformed"):
        nnx_checkpoint.merge(path, tmp_path / "one.ckpt")


@pytest.mark.parametrize(
    ("part", "value"),
    [("ranks", [1]), ("aliases", 7), ("objects", 7), ("objects", ["abc"]), ("ranks", {"x": 1})],
)
def test_what_nnx_left_beside_a_safetensors_file_is_checked(tmp_path: Path, part: str, value: Any) -> None:
    nnx_checkpoint.convert(save(tmp_path / "a.ckpt"), tmp_path / "st", to="safetensors")
    (left,) = (tmp_path / "st").glob("*state.json")
    left.write_text(json.dumps({**json.loads(left.read_text()), part: value}))
    with pytest.raises(CheckpointError, match="malformed data of nnx"):
        nnx_checkpoint.open_checkpoint(tmp_path / "st")


@pytest.mark.parametrize("optimizers", ["adam", [7], [{"groups": [{}], "values": {}}]])
def test_objects_called_optim_are_compared_whatever_they_are(tmp_path: Path, optimizers: Any) -> None:
    for name, step in (("a", 1), ("b", 2)):
        nnx_checkpoint.save(tmp_path / name, tensors={}, objects={"optim": optimizers, "step": step})
    differences = compare(*(nnx_checkpoint.open_checkpoint(tmp_path / name) for name in "ab"))
    assert "step" in str(differences) and "adam" not in str(differences)
    with pytest.raises(CheckpointError, match="malformed"):
        nnx_checkpoint.convert(tmp_path / "a", tmp_path / "c", to="dcp")


def test_shapes_beyond_all_numbers_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    save_id = json.loads((path / MANIFEST).read_bytes())["save_id"]
    index = json.loads((path / save_id / "index.json").read_bytes())
    for group in index["groups"]:
        group["shape"], group["grid"] = [0, 2**70], [0, 2**70]
    replace(path, "index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError):
        nnx_checkpoint.open_checkpoint(path)


def test_the_boxes_of_all_groups_are_bounded(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    save_id = json.loads((path / MANIFEST).read_bytes())["save_id"]
    index = json.loads((path / save_id / "index.json").read_bytes())
    (group,) = index["groups"]
    index["owners"] = [[0] * 60_000]
    index["groups"] = [{**group, "shape": [60_000 * i], "grid": [i]} for i in range(1, 6_000)]
    replace(path, "index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="more than 8,388,608 boxes"):
        nnx_checkpoint.open_checkpoint(path)
    index["groups"] = [{**group, "shape": [1] * 65, "grid": [1] * 65}]
    replace(path, "index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="not extents"):
        nnx_checkpoint.open_checkpoint(path)


def nested_lists(depth: int) -> list[Any]:
    tree: list[Any] = [0]
    for _ in range(depth):
        tree = [tree, tree]
    return tree


def test_two_kilobytes_with_a_million_million_leaves_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": nested_lists(40)}, tmp_path / "laughs.ckpt")
    with pytest.raises(CheckpointError, match=r"nests more than 1,000,000 objects in \d,\d+ bytes"):
        nnx_checkpoint.open_checkpoint(tmp_path / "laughs.ckpt")


def test_objects_that_were_pickled_are_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    nnx_checkpoint.save(path, tensors={}, objects={"x": Path}, opaque="pickle")
    torch.save({"x": nested_lists(40)}, tmp_path / "laughs")
    replace(path, "objects.bin", (tmp_path / "laughs").read_bytes())
    with pytest.raises(CheckpointError, match="nests more than"):
        _ = nnx_checkpoint.open_checkpoint(path).objects


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "zipped"), [(b"]", True), (b"N", True), (b"(", False), (b"]\x85", True), (b"}", False)]
)
def test_a_pickle_that_makes_an_object_of_each_byte_is_refused(
    tmp_path: Path, made: bytes, zipped: bool
) -> None:
    path = tmp_path / "swollen.ckpt"
    raw = b"\x80\x02" + made * (2_000_000 // len(made))
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", raw + b".")
            archive.writestr("archive/version", "3")
    else:
        beginning = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
        path.write_bytes(b"".join(pickle.dumps(value, 2) for value in beginning) + raw + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="makes so many objects"):
        nnx_checkpoint.open_checkpoint(path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 4 * path.stat().st_size + (64 << 20)


@pytest.mark.parametrize("place", ["state_dict", ".metadata"])
def test_a_tuple_that_is_a_key_and_never_ends_is_refused(tmp_path: Path, place: str) -> None:
    key: tuple[Any, ...] = (1,)
    for _ in range(60):
        key = (key, key)
    raw = b"\x80\x02}" + pickle.dumps(key, 2)[2:-1] + b"K\x01s."  # to be pickled, it would be hashed
    path = tmp_path / "checkpoint"
    if place == ".metadata":
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
        (path / place).write_bytes(raw)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", raw)
            archive.writestr("archive/version", "3")
    with pytest.raises(CheckpointError, match="makes so many objects"):
        nnx_checkpoint.open_checkpoint(path)


def test_negative_strides_are_refused(tmp_path: Path) -> None:
    class Turned:
        def __reduce__(self) -> tuple[Any, ...]:
            storage = torch.ones(4).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (typed, 0, (2, 1), (-(2**63), 1), False, OrderedDict())

    torch.save({"state_dict": {"w": Turned()}}, tmp_path / "turned.ckpt")
    with pytest.raises(CheckpointError, match="strides"):
        nnx_checkpoint.open_checkpoint(tmp_path / "turned.ckpt").read("model.w")


@pytest.mark.full
def test_a_large_pickle_of_plain_data_is_not_refused(tmp_path: Path) -> None:
    history = [{"step": step, "loss": [step / 2, f"step {step}"]} for step in range(20_000)]
    torch.save({"state_dict": {"w": torch.ones(2)}, "history": history}, tmp_path / "large.ckpt")
    assert nnx_checkpoint.open_checkpoint(tmp_path / "large.ckpt").objects["trainer"]["history"] == history


def test_a_tensor_of_terabytes_in_a_kilobyte_is_refused_and_a_small_expanded_one_is_not(
    tmp_path: Path,
) -> None:
    torch.save({"state_dict": {"w": torch.zeros(1).expand(1 << 40)}}, tmp_path / "wide.ckpt")
    with pytest.raises(CheckpointError, match="claims a tensor"):
        nnx_checkpoint.open_checkpoint(tmp_path / "wide.ckpt")
    torch.save({"state_dict": {"w": torch.ones(1).expand(1000)}}, tmp_path / "small.ckpt")
    assert nnx_checkpoint.open_checkpoint(tmp_path / "small.ckpt").read("model.w").sum() == 1000


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("record", ["byteorder", "data.pkl", "data/0"])
@pytest.mark.parametrize("kind", ["lightning", "nnscaler"])
def test_zip_bombs_are_refused_before_they_are_inflated(tmp_path: Path, record: str, kind: str) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
    bomb = tmp_path / ("bomb" if kind == "nnscaler" else "bomb.ckpt")
    if kind == "nnscaler":
        bomb.mkdir()
        bomb /= "0.pt"
    with (
        zipfile.ZipFile(tmp_path / "a.ckpt") as whole,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for entry in whole.infolist():
            inflated = bytes(70 << 20) if entry.filename.endswith(record) else b""
            archive.writestr(entry.filename, whole.read(entry) + inflated)
    expected = (
        "is not a checkpoint of a known format" if kind == "nnscaler" else "claims to hold 7.,...,... b"
    )
    with pytest.raises(CheckpointError, match=expected):
        nnx_checkpoint.open_checkpoint(bomb.parent if kind == "nnscaler" else bomb)


def test_parts_of_a_dcp_file_cannot_be_read_a_thousand_times(tmp_path: Path) -> None:
    state = {f"x{i}": [i] for i in range(3)}
    dcp.save(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a").objects
    (data,) = (tmp_path / "a").glob("*.distcp")
    data.write_bytes(data.read_bytes() + bytes(2 << 20))
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, offset=0, length=data.stat().st_size - 1)
    metadata.storage_data |= {
        dataclasses.replace(index, fqn=f"{index.fqn}{i}"): info
        for index, info in list(metadata.storage_data.items())
        for i in range(3)
    }
    metadata.state_dict_metadata |= {index.fqn: BytesStorageMetadata() for index in metadata.storage_data}
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the metadata says that parts of .* bytes are in it"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a")


def test_twenty_thousand_boxes_are_compared_quickly() -> None:
    count = 20_000
    stairs = [Box((0, i), (count - i, 1)) for i in range(count)]
    assert "elements" in find_fault((count, count), stairs)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the rank file, with the right digest in the manifest."""
    save_id = json.loads((path / MANIFEST).read_bytes())["save_id"]
    file = path / save_id / "r00000.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(raw[:8] + text + raw[8 + length :])
    digested = digest(raw[:8] + text)
    alter_manifest(path, lambda body: body["files"][file.name].update(digest=digested))
    (path / save_id / MANIFEST).write_bytes((path / MANIFEST).read_bytes())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda header: header["model.w"].update(shape=[3, 1]), "contradict each other about 'model.w'"),
        (lambda header: header["model.w"].update(dtype="I32"), "contradict each other about 'model.w'"),
        (lambda header: header["model.w"].update(data_offsets=[4, 16]), "contradict each other"),
        (lambda header: header.update({"model.x": header.pop("model.w")}), "contradict each other"),
        (lambda header: header.pop("__metadata__"), "is malformed"),
    ],
)
def test_a_header_that_contradicts_the_index_is_reported_and_not_read_by(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    path = save(tmp_path / "a.ckpt")
    rewrite_header(path, lambda header: None)
    assert torch.equal(nnx_checkpoint.open_checkpoint(path).read("model.w"), torch.ones(3))
    assert nnx_checkpoint.verify(path) == []
    rewrite_header(path, change)
    with pytest.raises(CheckpointError, match=problem):
        nnx_checkpoint.open_checkpoint(path).read("model.w")
    (damage,) = nnx_checkpoint.verify(path)
    assert problem in damage.problem


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.update(format="tf"),
        lambda metadata: metadata.pop("DCP_SHARDING_INFO"),
        lambda metadata: metadata.update(DCP_SHARDING_INFO='{"model.w":{"saved_offsets":[1]}}'),
        lambda metadata: metadata.update(DCP_SHARDING_INFO="{}"),
        lambda metadata: metadata.update(nnx='{"a":{}}'),
    ],
)
def test_what_only_other_programs_read_in_a_header_is_verified_too(tmp_path: Path, change: Any) -> None:
    path = save(tmp_path / "a.ckpt")
    rewrite_header(path, lambda header: change(header["__metadata__"]))
    assert torch.equal(nnx_checkpoint.open_checkpoint(path).read("model.w"), torch.ones(3))
    (damage,) = nnx_checkpoint.verify(path)
    assert "its header is malformed" in damage.problem


def zipped_again(path: Path, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> Path:
    """Write the records of a file of torch.save as any zip program does, which aligns nothing."""
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in change(records):
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("change", [lambda records: records, lambda records: records[::-1]])
def test_tensors_are_read_where_a_zip_file_has_them(tmp_path: Path, change: Any) -> None:
    """torch calculates where its own writer would have put them."""
    path = tmp_path / "a.ckpt"
    state = {"a": torch.arange(3.0), "b": torch.arange(4.0) + 10}
    torch.save({"state_dict": state}, path)
    opened = nnx_checkpoint.open_checkpoint(zipped_again(path, change))
    assert {name: opened.read(f"model.{name}").tolist() for name in state} == {
        name: value.tolist() for name, value in state.items()
    }


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("fault", ["short record", "twice"])
def test_records_that_do_not_hold_their_tensor_are_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"a": torch.arange(30.0), "b": torch.ones(30)}}, path)

    def change(records: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        if fault == "twice":
            return [*records, ("a/data/0", b"x" * 120)]
        return [(name, data[:60] if name.endswith("data/0") else data) for name, data in records]

    with pytest.raises(CheckpointError, match=r"its data ends before|two records with one name|cannot read"):
        nnx_checkpoint.open_checkpoint(zipped_again(path, change))


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[31mred", "a\rb", "\u202egnp.exe", "\x9b31m"])
def test_nothing_that_steers_a_terminal_is_printed(text: str) -> None:
    shown = printable(f"before {text}\nafter")
    assert shown.replace("\n", "").isprintable()
    assert shown.startswith("before ")
    assert shown.endswith("\nafter")


def test_a_tensor_whose_name_is_a_list_is_refused() -> None:
    body = {
        "version": 1,
        "objects": {"a": {"$": "tensor", "name": []}},
        "ranks": {},
        "aliases": {},
        "world_size": 1,
    }
    contents = Contents(Path("x"), "dcp")
    with pytest.raises(CheckpointError, match="not the name of a tensor"):
        unpack(json.dumps({**body, "provenance": {}}), contents, lambda name: name, source="x")


_OTHER_THAN_SAVED: list[Any] = [5, [1], "x", None, torch.ones(2)]
_OTHER_THAN_SAVED += [{FABRIC_KEYS: 5}, {FABRIC_KEYS: {"modules": 1}}]


@pytest.mark.parametrize("name", ["trainer", "extra", "optim"])
@pytest.mark.parametrize("value", _OTHER_THAN_SAVED, ids=range(len(_OTHER_THAN_SAVED)))
def test_what_others_saved_under_the_names_of_nnx_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    objects = {"trainer": {}, "extra": {}, "optim": [], name: value}
    path = tmp_path / "a.ckpt"
    nnx_checkpoint.save(path, {"model.w": torch.ones(3)}, objects=objects)
    model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    uses = (
        lambda: nnx_checkpoint.merge(path, tmp_path / "merged.ckpt"),
        lambda: nnx_checkpoint.convert(path, tmp_path / "converted", to="dcp"),
        lambda: nnx_checkpoint.load(path, model=model, optimizer=optimizer),
        lambda: load_from_checkpoint(LightningModule, path),
    )
    for use in uses if (name, value) != ("optim", None) else uses[2:]:
        with pytest.raises(CheckpointError):
            use()
