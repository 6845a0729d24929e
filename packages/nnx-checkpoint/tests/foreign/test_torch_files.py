"""Files of torch.save from Lightning and from users are read without unpickling and without trust."""

from __future__ import annotations

import collections
import fractions
import pathlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nnx_checkpoint
from nnx_base.box import Box
from nnx_checkpoint._torch_compat import position_in_file
from nnx_checkpoint.foreign.contents import ForeignCheckpoint
from nnx_checkpoint.foreign.flat_buffers import pieces_of_range
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_checkpoint.unpickling.allowed import Inert
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file
from nnx_core.errors import CheckpointError


@pytest.mark.parametrize(
    ("saved", "optimizers", "trainer"),
    [
        ({"w": torch.ones(2), "b": torch.zeros(())}, None, set()),
        ({"model": {"w": torch.ones(2)}, "step": 5}, None, {"step"}),
        ({"model_state_dict": {"w": torch.ones(2)}, "optimizer_state_dict": None, "loss": 0.5}, 1, {"loss"}),
        (
            {"module": {"w": torch.ones(2), "_extra_state": 3}, "optimizer": None, "sched": {"a": 1}},
            1,
            {"sched"},
        ),
        ({"state_dict": {"w": torch.ones(2), "note": "x"}, "ema": {"w": torch.zeros(2)}}, None, {"ema"}),
    ],
)
def test_files_as_users_have_them_are_interpreted(
    tmp_path: Path, saved: dict[str, Any], optimizers: int | None, trainer: set[str]
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    filled = {key: optimizer.state_dict() if value is None else value for key, value in saved.items()}
    torch.save(filled, tmp_path / "file.pt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "file.pt")
    assert opened.read("model.w").tolist() == [1, 1]
    assert set(opened.objects["trainer"]) == trainer
    assert len(opened.objects.get("optim", [])) == (optimizers or 0)
    if optimizers:
        assert torch.equal(opened.read("optim.0.state.0.exp_avg"), optimizer.state[parameter]["exp_avg"])


def test_a_bare_module_is_read_where_the_file_is_trusted(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear.*weights_only=False"):
        nnx_checkpoint.open_checkpoint(tmp_path / "m.pt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "m.pt", weights_only=False)
    assert set(opened.tensors) == {"model.weight", "model.bias"}


def test_names_of_parameters_in_the_file_are_used(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(state, tmp_path / "named.ckpt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "named.ckpt")
    assert "optim.0.state.weight.momentum_buffer" in opened.tensors
    assert opened.objects["optim"][0]["groups"][0]["params"] == ["weight", "bias"]


@pytest.mark.parametrize("layout", ["transposed", "channels last", "sliced", "expanded", "stepped"])
def test_tensors_of_any_strides_are_read_in_parts(tmp_path: Path, layout: str) -> None:
    base = torch.arange(240.0).view(2, 4, 5, 6)
    tensor = {
        "transposed": base.transpose(1, 3),
        "channels last": base.to(memory_format=torch.channels_last),
        "sliced": base[:, 1:3],
        "expanded": base[:, :1].expand(2, 4, 5, 6),
        "stepped": base[:, :, ::2],
    }[layout]
    torch.save({"w": tensor}, tmp_path / "w.pt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "w.pt")
    assert torch.equal(opened.read("model.w"), tensor)
    from nnx_base.shard import Box

    shape = tuple(tensor.shape)
    box = Box((1, 1, 0, 2), (1, shape[1] - 1, shape[2], 1))
    assert torch.equal(opened.read("model.w", box), tensor[box.slices])


@pytest.mark.parametrize("kind", ["compressed", "old format", "other byte order"])
def test_files_that_cannot_be_read_in_place_are_read_all_the_same(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.arange(10.0)}
    path = tmp_path / "w.pt"
    torch.save(state, path, _use_new_zipfile_serialization=kind != "old format")
    if kind != "old format":
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        method = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        if kind == "other byte order":
            records["w/byteorder"] = b"big"
            records["w/data/0"] = state["w"].numpy().byteswap().tobytes()
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, data in records.items():
                archive.writestr(name, data)
    opened = nnx_checkpoint.open_checkpoint(path)
    assert opened.format == "lightning"
    assert torch.equal(opened.read("model.w"), state["w"])


def test_parameters_and_odd_leaves_are_read(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": nn.Parameter(torch.ones(3))}, "when": pathlib.PurePosixPath("a")}, tmp_path / "p"
    )
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "p")
    assert opened.read("model.w").tolist() == [1, 1, 1]
    assert opened.objects["trainer"]["when"] == pathlib.PurePosixPath("a")


def test_what_an_optimizer_saves_besides_is_kept(tmp_path: Path) -> None:
    state = {"state": {}, "param_groups": [{"params": [0], "lr": torch.tensor(0.1)}], "scale": 2}
    torch.save({"state_dict": {"w": torch.ones(1)}, "optimizer_states": [state]}, tmp_path / "a.ckpt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    assert opened.objects["optim"][0]["other"] == {"scale": 2}
    assert opened.objects["optim"][0]["groups"][0]["lr"] == torch.tensor(0.1)
    nnx_checkpoint.convert(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    again = torch.load(tmp_path / "b.ckpt", weights_only=True)["optimizer_states"][0]
    assert again["scale"] == 2
    assert again["param_groups"] == state["param_groups"]


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (exec, (f"open({self.path!r}, 'w').close()",))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old format"])
@pytest.mark.parametrize("place", ["hyper_parameters", "state_dict", "nnx"])
def test_nothing_in_a_file_is_executed(tmp_path: Path, new: bool, place: str) -> None:
    proof = tmp_path / "executed"
    content: dict[str, Any] = {"state_dict": {"w": torch.ones(1)}, place: {"x": Evil(proof)}}
    torch.save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt.*weights_only=False"):
        nnx_checkpoint.open_checkpoint(tmp_path / "evil.ckpt")
    assert not proof.exists()
    nnx_checkpoint.open_checkpoint(tmp_path / "evil.ckpt", weights_only=False)
    assert proof.exists()  # or the test shows nothing


def test_the_class_that_needs_trust_is_named(tmp_path: Path) -> None:
    content = {"state_dict": {"w": torch.ones(1)}, "hyper_parameters": {"x": collections.ChainMap({})}}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"collections\.ChainMap.*weights_only=False.*ignore="):
        nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert opened.objects["trainer"]["hyper_parameters"]["x"] == collections.ChainMap({})


def test_a_file_cannot_change_the_classes_it_may_name(tmp_path: Path) -> None:
    """BUILD on a class instead of on an instance would set attributes of the class itself."""
    named = b"cargparse\nNamespace\n"
    stream = b"\x80\x02}X\x01\x00\x00\x00a" + named + b"(N}X\x06\x00\x00\x00poisonI1\ns\x86bs."
    stream = stream.replace(b"(N}", b"N}")
    raw = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}}, raw)
    with zipfile.ZipFile(raw) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records["a/data.pkl"] = stream
    with zipfile.ZipFile(raw, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError):
        nnx_checkpoint.open_checkpoint(raw)
    import argparse

    assert not hasattr(argparse.Namespace, "poison")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncate", r"'.*a\.ckpt' is truncated: the end"),
        ("pickle", r"cannot read '.*a\.ckpt'"),
        ("other", r"'.*a\.ckpt' holds a list, expected a dict"),
        ("script", r"cannot read '.*a\.ckpt'.*torchscript"),
        ("leftovers", r"'.*a\.ckpt' holds malformed data of nnx"),
        ("contradiction", r"'.*a\.ckpt' contradicts itself: TypeError"),
        ("newer", r"'.*a\.ckpt' holds data of nnx in version 9.*Upgrade"),
        ("alias", r"has the name 'model.b' for tensor 'model.nowhere'"),
    ],
)
def test_damaged_and_strange_files_are_named(tmp_path: Path, damage: str, message: str) -> None:
    path = tmp_path / "a.ckpt"
    ours = {"left": "{", "tensors": {}, "parameter_names": [], "added": [], "fabric": None}
    body = '{"version":%d,"objects":{},"ranks":{},"aliases":{"model.b":"model.nowhere"},'
    body += '"world_size":1,"provenance":{}}'
    contents: dict[str, Any] = {
        "other": [1, 2],
        "leftovers": {"state_dict": {}, "nnx": ours},
        "contradiction": {"state_dict": {}, "nnx": {**ours, "added": 5}},
        "newer": {"state_dict": {}, "nnx": {**ours, "left": body % 9}},
        "alias": {"state_dict": {}, "nnx": {**ours, "left": body % 1}},
    }
    if damage == "script":
        torch.jit.script(nn.Linear(1, 1)).save(str(path))
    else:
        torch.save(contents.get(damage, {"state_dict": {"w": torch.ones(1000)}}), path)
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:3000])
    if damage == "pickle":
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"FloatStorage", b"FlootStorage").replace(b"\x80\x02}", b"\x80\x02\xff"))
    with pytest.raises(CheckpointError, match=message):
        nnx_checkpoint.open_checkpoint(path)


def test_element_types_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2).to(torch.float8_e8m0fnu)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"tensor 'model\.w'.*float8_e8m0fnu, which is not supported"):
        nnx_checkpoint.open_checkpoint(tmp_path / "a.pt")


def test_an_inert_class_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    torch.save({"x": fractions.Fraction(1, 3), "y": [torch.ones(2)]}, tmp_path / "a")
    loaded = load_torch_file(tmp_path / "a", inert=["fractions."])
    assert isinstance(loaded["x"], Inert)
    assert loaded["x"].arguments == (1, 3)
    with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
        load_torch_file(tmp_path / "a")


def test_names_replace_numbers_only_where_they_are_names_of_the_model(tmp_path: Path) -> None:
    module = nn.ModuleDict({"net": nn.Linear(2, 2)})
    path = tmp_path / "named.ckpt"
    for part, expected in ((module, ["net.weight", "net.bias"]), (module["net"], [0, 1])):
        optimizer = torch.optim.AdamW(part.named_parameters())
        optimizer.zero_grad()
        module["net"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.save({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}, path)
        states = stored_optimizer_states(nnx_checkpoint.open_checkpoint(path))
        assert states is not None
        assert states[0]["param_groups"][0]["params"] == expected
        assert list(states[0]["state"]) == expected


def test_a_tensor_whose_place_torch_does_not_say_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"did not record the position of a 12-byte tensor.* torch 2\.11 to"
    ):
        position_in_file(torch.ones(3))
    assert position_in_file(torch.ones(0)) == 0


def test_a_record_longer_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "w.pt", "w") as changed:
        for entry in whole.infolist():
            data = whole.read(entry)
            changed.writestr(entry.filename, data + data if entry.filename.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="storage of 8 bytes in a record of 16"):
        nnx_checkpoint.open_checkpoint(tmp_path / "w.pt")


def test_a_record_whose_header_names_another_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    raw = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(raw.replace(b"w/data/0", b"w/dAta/0", 1))  # not in the list of contents
    with pytest.raises(CheckpointError, match="differ"):
        nnx_checkpoint.open_checkpoint(tmp_path / "w.pt")


def test_all_tensors_are_read_as_one_by_one(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.arange(3), "many": [torch.full((1,), float(i)) for i in range(100)]}, tmp_path / "t.pt"
    )
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "t.pt")
    everything = checkpoint.read_all()
    assert set(everything) == set(checkpoint.tensors)
    assert all(torch.equal(everything[name], checkpoint.read(name)) for name in everything)


def test_a_claimed_number_of_ranks_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "one.ckpt")
    monkeypatch.setattr(ForeignCheckpoint, "world_size", 2**32 - 1)
    nnx_checkpoint.convert(tmp_path / "one.ckpt", tmp_path / "dcp", to="dcp")
    monkeypatch.undo()
    assert nnx_checkpoint.open_checkpoint(tmp_path / "dcp").own_ranks == []


def test_a_shape_of_thousands_of_dims_is_refused_at_once() -> None:
    source = FileTensor((8,), torch.float32, (1,), Path("flat.pt"), 0)
    with pytest.raises(CheckpointError, match="claims 5000 dims"):
        pieces_of_range(source, 0, Box.whole((2,) * 5000), 0, 8)
