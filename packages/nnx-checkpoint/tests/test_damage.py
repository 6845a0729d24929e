"""Damage on disk is found, named, and never loaded."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.format import manifest as manifest_module
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.training import Run, train


def load_everything(path: Path) -> None:
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    assert checkpoint.objects is not None
    assert checkpoint.rank_objects(0) is not None


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.full)])
def test_every_single_byte_flip_of_every_file_is_detected(small: Path, stride: int) -> None:
    names = {file.name for file in files_of(small)}
    assert names == {
        "manifest.json", "index.json", "objects.json", "r00000.objects.json", "r00000.safetensors",
        "r00000.sums",
    }  # fmt: skip
    flips = 0
    for file in files_of(small):
        original = file.read_bytes()
        is_copy = file.name == "manifest.json" and file.parent != small
        with file.open("r+b", buffering=0) as handle:
            for position in range(0, len(original), stride):
                flips += 1
                handle.seek(position)
                handle.write(bytes([original[position] ^ (1 << (position % 8))]))
                found = nnx_checkpoint.verify(small)
                assert found, f"{file.name} byte {position}: not found by verify"
                assert any(file == small / damage.file for damage in found), (file, position, found)
                if not is_copy:  # which loading does not read
                    with pytest.raises(CheckpointError):
                        load_everything(small)
                handle.seek(position)
                handle.write(original[position : position + 1])
    assert nnx_checkpoint.verify(small) == []
    load_everything(small)
    assert flips > 5000 // stride


def everything(path: Path) -> dict[str, Any]:
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    found: dict[str, Any] = {n: torch.empty(e.shape, dtype=e.dtype) for n, e in checkpoint.tensors.items()}
    checkpoint.fill({name: shard_of(value) for name, value in found.items()})
    found |= {f"alias {name}": target for name, target in checkpoint.aliases.items()}
    found["objects"] = checkpoint.objects
    return found | {f"rank {r}": checkpoint.rank_objects(r) for r in range(checkpoint.world_size)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.full
def test_random_flips_in_a_trained_checkpoint_are_found_and_none_is_loaded(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Some hundred of them; every single byte of a smaller checkpoint is flipped above."""
    path = tmp_path / "trained.ckpt"
    run = Run(options={"min_num_params": 100}, optimizer="mixed", optimizers=3, steps=2, save_at=6, devices=3)
    pool.run(train, replace(run, save=str(path)), world_size=3)
    original, dice = everything(path), random.Random(0)
    files = files_of(path)
    assert sum(file.suffix == ".safetensors" for file in files) == 3
    assert sum(name.startswith("optim.") for name in original) > 20
    flips, refused = int(os.environ.get("NNX_FLIPS", "300")), 0
    for number in range(flips):
        file = files[number % len(files)]
        position = dice.randrange(file.stat().st_size)
        with file.open("r+b", buffering=0) as handle:
            handle.seek(position)
            byte = handle.read(1)[0]
            handle.seek(position)
            handle.write(bytes([byte ^ (1 << dice.randrange(8))]))
            damage = nnx_checkpoint.verify(path)
            assert any(file == path / found.file for found in damage), (file, position, damage)
            try:
                assert same(everything(path), original), (file, position)
            except CheckpointError as error:
                assert file.name in str(error), (file, position, error)
                refused += 1
            handle.seek(position)
            handle.write(bytes([byte]))
    # Only the manifest's copy is not read by loading.
    assert refused == flips - sum(
        files[i % len(files)].parent != path and files[i % len(files)].name == "manifest.json"
        for i in range(flips)
    )
    assert nnx_checkpoint.verify(path) == []


def test_a_flipped_byte_in_data_names_file_bytes_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a"
    nnx_checkpoint.save(path, tensors={"w": shard_of(torch.zeros(300_000))}, objects={})
    directory = path / nnx_checkpoint.open_checkpoint(path).manifest.save_id
    flip(directory / "r00000.safetensors", 4096 + 600_000)
    (damage,) = nnx_checkpoint.verify(path)
    assert damage.file == f"{directory.name}/r00000.safetensors"
    assert (damage.start, damage.stop) == (4096 + 2 * 262144, 4096 + 3 * 262144)
    assert damage.problem == "block 2 of tensor 'w' is damaged."
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"r00000.safetensors' is damaged: bytes 528384-790528 \(block 2, "
    ):
        checkpoint.read("w")
    # What does not touch the damaged block still loads.
    from nnx_base.shard import Box

    assert checkpoint.read("w", Box((0,), (131_072,))).sum() == 0
    assert checkpoint.read("w", Box((250_000,), (50_000,))).sum() == 0


def flip(file: Path, position: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= 0x10
    file.write_bytes(raw)


@pytest.mark.parametrize("name", ["index.json", "objects.json", "r00000.safetensors", "r00000.sums"])
def test_a_missing_file_is_named(small: Path, directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}' is missing"):
        nnx_checkpoint.open_checkpoint(small)
    assert any(damage.file.endswith(name) for damage in nnx_checkpoint.verify(small))


@pytest.mark.parametrize("name", ["index.json", "objects.json", "r00000.safetensors", "r00000.sums"])
def test_a_truncated_file_is_named_with_its_sizes(small: Path, directory: Path, name: str) -> None:
    raw = (directory / name).read_bytes()
    (directory / name).write_bytes(raw[:-1])
    with pytest.raises(
        CheckpointError, match=f"{name}' is truncated: {len(raw) - 1} bytes, expected {len(raw)}"
    ):
        nnx_checkpoint.open_checkpoint(small)
    assert nnx_checkpoint.verify(small)


def test_a_file_that_grew_is_named(small: Path, directory: Path) -> None:
    with (directory / "objects.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=r"objects.json' is too long"):
        nnx_checkpoint.open_checkpoint(small)
    assert nnx_checkpoint.verify(small)


def test_a_save_directory_that_vanished_is_named(small: Path, directory: Path) -> None:
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match="is missing"):
        nnx_checkpoint.open_checkpoint(small)
    assert nnx_checkpoint.verify(small)


def test_a_file_that_vanishes_after_opening_is_named(small: Path, directory: Path) -> None:
    checkpoint = nnx_checkpoint.open_checkpoint(small)
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match=r"cannot read '.*r00000.safetensors': No such file"):
        checkpoint.read("model.w")


@pytest.mark.parametrize("keep", [0, 1, 20, 400])
def test_a_torn_manifest_is_damaged(small: Path, keep: int) -> None:
    raw = (small / "manifest.json").read_bytes()
    (small / "manifest.json").write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: it is not JSON"):
        nnx_checkpoint.open_checkpoint(small)
    (damage,) = nnx_checkpoint.verify(small)
    assert damage.file == "manifest.json"


def test_what_is_not_a_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    for name, reason in {
        "nothing": "there is no such directory",
        "file": "it is a file",
        "dir": "it has no manifest.json; a first save that was interrupted leaves none",
    }.items():
        assert not nnx_checkpoint.is_checkpoint(tmp_path / name)
        for function in (nnx_checkpoint.open_native, nnx_checkpoint.verify):
            with pytest.raises(CheckpointError, match=f"{name}' is not an nnx checkpoint: {reason}"):
                function(tmp_path / name)


def test_another_programs_manifest_is_refused(tmp_path: Path) -> None:
    for text, why in (
        ('{"name": "an app"}', "is not the manifest of an"),
        ("[1]", "it is not a JSON object"),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match="is not the manifest of an nnx checkpoint"):
            nnx_checkpoint.open_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=why):
            nnx_checkpoint.open_native(tmp_path)


def forge(path: Path, change: Any) -> None:
    """Rewrite a manifest with a correct digest, as only a malicious or future program would."""
    import json

    raw = path.read_bytes()
    body = json.loads(raw)
    change(body)
    body.pop("digest")
    head = manifest_module._HEAD + manifest_module._ZEROS + b'",'
    path.write_bytes(manifest_module._sign(head + json.dumps(body, indent=1)[1:].encode() + b"\n"))


def test_a_newer_format_is_refused_with_the_way_out(small: Path) -> None:
    forge(small / "manifest.json", lambda body: body.update(version=[2, 0]))
    for function in (nnx_checkpoint.open_checkpoint, nnx_checkpoint.verify):
        with pytest.raises(CheckpointError, match=r"format version 2.0; this nnx reads version 1.x.*Upgrade"):
            function(small)


def test_a_newer_minor_version_is_read(small: Path) -> None:
    forge(small / "manifest.json", lambda body: body.update(version=[1, 7], news="ignored"))
    load_everything(small)


def test_an_unknown_required_feature_is_refused(small: Path) -> None:
    forge(small / "manifest.json", lambda body: body.update(requires=["compression"]))
    with pytest.raises(
        CheckpointError, match=r"needs features that this nnx does not know: \['compression'\]"
    ):
        nnx_checkpoint.open_checkpoint(small)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(save_id="../../etc"),
        lambda body: body["files"].update({"../x": {"size": 1, "digest": "0" * 32, "digested": 1}}),
        lambda body: body["files"].update({"x": {"size": -1, "digest": "0" * 32, "digested": 0}}),
        lambda body: body["files"].update({"x": {"size": 1, "digest": "0" * 32, "digested": 2}}),
        lambda body: body["files"].update({"x": {"size": 1, "digest": "q", "digested": 1}}),
        lambda body: body["hash"].update(block=0),
        lambda body: body["hash"].update(block=1.5),
        lambda body: body["hash"].update(algorithm="md5"),
        lambda body: body.pop("hash"),
        lambda body: body.update(files=[]),
    ],
)
def test_a_forged_manifest_is_refused(small: Path, change: Any) -> None:
    forge(small / "manifest.json", change)
    with pytest.raises(CheckpointError, match="is damaged: malformed entry"):
        nnx_checkpoint.open_checkpoint(small)


def test_a_manifest_without_an_index_is_refused(small: Path) -> None:
    forge(small / "manifest.json", lambda body: body["files"].pop("index.json"))
    with pytest.raises(CheckpointError, match=r"lists no index.json"):
        nnx_checkpoint.open_checkpoint(small)


def forge_index(small: Path, directory: Path, change: Any) -> None:
    import json

    body = json.loads((directory / "index.json").read_bytes())
    change(body)
    raw = json.dumps(body).encode()
    (directory / "index.json").write_bytes(raw)
    entry = {"size": len(raw), "digest": xxhash.xxh3_128_hexdigest(raw), "digested": len(raw)}
    forge(small / "manifest.json", lambda manifest: manifest["files"].update({"index.json": entry}))


def list_boxes(body: dict[str, Any]) -> None:
    """Spell the boxes of every group out: all tensors are whole."""
    for group in body["groups"]:
        if "grid" in group:
            size = group.pop("grid")
            group["boxes"] = [[[0] * len(size), size]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda group, body: group["boxes"].clear(), "0 boxes with 1 owners"),
        (lambda group, body: group["boxes"][0].__setitem__(1, [60, 10]), "lies outside the shape"),
        (lambda group, body: group["boxes"][0].__setitem__(1, [5, 10]), "hold 50 of 60"),
        (lambda group, body: group["boxes"][0].__setitem__(0, [0, -1]), "malformed entry"),
        (lambda group, body: group.update(owners=5), "malformed entry"),
        (lambda group, body: group.update(owners=-1), "malformed entry"),
        (lambda group, body: group.update(dtype="object"), "malformed entry"),
        (lambda group, body: group.update(dtype="float64"), "end at"),
        (lambda group, body: group.update(shape=[60]), "malformed entry|outside"),
        (lambda group, body: body["tensors"].pop("model.step"), "end at"),
        (lambda group, body: body["tensors"].update(bad=99), "malformed entry"),
        (lambda group, body: body["owners"].__setitem__(group["owners"], [1]), "malformed entry"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    small: Path, directory: Path, change: Any, reason: str
) -> None:
    forge_index(small, directory, list_boxes)
    assert nnx_checkpoint.open_checkpoint(small).read("model.w").sum() == sum(range(60))
    forge_index(small, directory, lambda body: change(body["groups"][body["tensors"]["model.w"]], body))
    with pytest.raises(CheckpointError, match=f"index.json' contradicts itself: .*({reason})"):
        nnx_checkpoint.open_checkpoint(small)
    assert nnx_checkpoint.verify(small)


@pytest.mark.parametrize("aliases", [{"a": "nowhere"}, {"model.w": "model.step"}])
def test_a_wrong_alias_in_the_index_is_refused(small: Path, directory: Path, aliases: Any) -> None:
    forge_index(small, directory, lambda body: body.update(aliases=aliases))
    with pytest.raises(CheckpointError, match="contradicts itself: alias"):
        nnx_checkpoint.open_checkpoint(small)


def test_an_index_that_names_an_unlisted_file_is_refused(small: Path, directory: Path) -> None:
    forge_index(small, directory, lambda body: body.update(files=["objects.bin"]))
    with pytest.raises(CheckpointError, match=r"'objects.bin' or its checksums are not in the manifest"):
        nnx_checkpoint.open_checkpoint(small)


def test_checksums_of_the_wrong_number_are_refused(small: Path, directory: Path) -> None:
    (directory / "r00000.sums").write_bytes(b"")
    entry = {"size": 0, "digest": xxhash.xxh3_128_hexdigest(b""), "digested": 0}
    forge(small / "manifest.json", lambda body: body["files"].update({"r00000.sums": entry}))
    with pytest.raises(CheckpointError, match=r"r00000.sums' has 0 bytes, expected"):
        nnx_checkpoint.open_checkpoint(small).read("model.w")
    assert any("checksums do not match" in damage.problem for damage in nnx_checkpoint.verify(small))


def test_verify_lists_all_damage_in_one_run(small: Path, directory: Path) -> None:
    flip(directory / "r00000.sums", 0)
    flip(directory / "objects.json", 0)
    found = {damage.file.split("/")[1]: damage.problem for damage in nnx_checkpoint.verify(small)}
    assert set(found) == {"r00000.sums", "objects.json", "r00000.safetensors"}
    assert found["r00000.safetensors"] == "cannot be checked, because 'r00000.sums' is damaged."


def test_verify_reports_its_progress(small: Path) -> None:
    calls: list[tuple[int, int]] = []
    nnx_checkpoint.verify(small, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("length", [3, 8])
def test_checksums_that_are_not_as_many_as_the_blocks_are_damage(small: Path, length: int) -> None:
    """The file is signed again, as a forger could do."""
    manifest = manifest_module.decode_manifest((small / "manifest.json").read_bytes(), source="x")
    sums = small / manifest.save_id / "r00000.sums"
    raw = sums.read_bytes() + bytes(length)
    sums.write_bytes(raw)
    entry = manifest_module.FileEntry(len(raw), manifest_module.digest(raw), len(raw))
    forged = manifest_module.encode_manifest(
        replace(manifest, files={**manifest.files, "r00000.sums": entry})
    )
    for place in (small, small / manifest.save_id):
        (place / "manifest.json").write_bytes(forged)
    assert any("checksums do not match its" in found.problem for found in nnx_checkpoint.verify(small))
    with pytest.raises(CheckpointError, match="bytes, expected"):
        load_everything(small)
