"""Detection of a path's format: an unreadable path is no checkpoint, and the search continues."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from nnx_base.errors import CheckpointError
from nnx_base.shard import shard_of
from nnx_checkpoint.format.declaration import CheckpointFormatSpec
from nnx_checkpoint.format.manifest import MANIFEST
from nnx_checkpoint.reading import formats
from nnx_checkpoint.reading.formats import find_format, get_format, open_checkpoint, specs
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.survey import survey
from nnx_checkpoint.writing.collecting import collect_garbage

NAMES = (
    "0.pt",
    "rank_0.pt",
    ".metadata",
    "meta.pt",
    "latest",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "mp_rank_00_model_states.pt",
    "x.ckpt",
    MANIFEST,
)
"""Every name by which a format recognises something."""


class Bare(formats.CheckpointFormat):
    """A plugin's format that looks around as if nothing could go wrong."""

    name = "bare"

    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        for child in place.iterdir():
            if child.is_dir() and any(inner.stat().st_size < 0 for inner in child.iterdir()):
                return True
        return place.resolve(strict=True).stat().st_size < 0 or (place / "x.ckpt").stat().st_size < 0

    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        raise NotImplementedError


FORMATS = [*specs(), "bare"]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin gives the format `Bare`."""
    spec = CheckpointFormatSpec("bare", "acme:Bare", description="of a plugin")
    others, load = formats.from_outside(), formats._load
    monkeypatch.setattr(formats, "from_outside", lambda: {**others, "bare": spec})
    monkeypatch.setattr(formats, "_load", lambda target: Bare() if target == "acme:Bare" else load(target))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def as_nobody(work: Callable[[], Any]) -> str:
    """Run a function in a process of an unprivileged user, and return its result or error as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            found = f"{work()!r}"
        except CheckpointError as error:
            found = f"CheckpointError: {error}"
        except BaseException as error:
            found = f"raw {type(error).__name__}: {error}"
        os.write(writing, found.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        found = answer.read().decode()
    os.waitpid(child, 0)
    return found


def looked_at(place: Path, make: Callable[[Path], Path], use: Callable[[Path], Any]) -> str:
    """Look at an odd directory as an unprivileged user, and return the result or error as text."""
    if make is not vanishing:
        path = make(place)
        return as_nobody(lambda: use(path))
    place.chmod(0o777)
    return as_nobody(lambda: use(make(place)))


def fill(directory: Path) -> None:
    """Fill a directory with all files that any format would look for; none is a checkpoint."""
    for name in NAMES:
        (directory / name).write_bytes(b"no checkpoint")


def unreadable(place: Path) -> Path:
    locked = place / "lost+found"
    locked.mkdir()
    fill(locked)
    locked.chmod(0)
    return place


def unreadable_itself(place: Path) -> Path:
    return unreadable(place) / "lost+found"


def listable_only(place: Path) -> Path:
    """Names can be read there, and nothing else."""
    fill(place)
    (place / "inner").mkdir()
    place.chmod(0o744 if os.getuid() == 0 else 0o400)
    return place


def unreadable_files(place: Path) -> Path:
    fill(place)
    for file in place.iterdir():
        file.chmod(0)
    return place


def looping(place: Path) -> Path:
    for name in (*NAMES, "model", "tag"):
        (place / name).symlink_to(name)
    (place / "round").symlink_to(".")
    return place


def vanishing(place: Path) -> Path:
    """Everything below is removed when the second directory is listed."""
    for name in ("a", "b"):
        (place / name).mkdir()
        fill(place / name)
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.scandir", "os.listdir", "open") and str(arguments[0]).startswith(f"{place}/"):
            seen.append(str(arguments[0]))
            if len(seen) == 2:
                for inner in ("a", "b"):
                    shutil.rmtree(place / inner, ignore_errors=True)

    sys.addaudithook(hook)  # for good, so only a child may call this
    return place


KINDS = [unreadable, unreadable_itself, listable_only, unreadable_files, looping, vanishing]


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_cannot_look_at_is_not_its_own(
    place: Path, bare: None, format: str, make: Callable[[Path], Path]
) -> None:
    candidate = get_format(format)  # imported here: nobody may not read everything
    assert looked_at(place, make, lambda path: formats.recognises(candidate, path)) in ("True", "False")


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "use",
    [find_format, open_checkpoint, lambda path: list(survey(path)), collect_garbage],
    ids=["find", "open", "survey", "gc"],
)
def test_no_raw_error_of_the_system_escapes(
    place: Path, bare: None, make: Callable[[Path], Path], use: Callable[[Path], Any]
) -> None:
    for name in specs():
        get_format(name)
    answer = looked_at(place, make, use)
    assert not answer.startswith("raw"), answer


def test_a_directory_that_cannot_be_read_is_named_and_the_rest_is_found(place: Path) -> None:
    save(unreadable(place) / "z.ckpt")
    torch.save({"state_dict": {"w": torch.ones(2)}}, place / "b.ckpt")
    rest = as_nobody(lambda: sorted(found.format for found in survey(place)))
    assert rest == "['lightning', 'nnx']"
    assert "lost+found': Permission denied" in as_nobody(lambda: collect_garbage(place).failed)
    assert "Make it readable for this user" in as_nobody(lambda: open_checkpoint(place / "lost+found"))
    (place / "b.ckpt").chmod(0)
    assert "cannot read" in as_nobody(lambda: open_checkpoint(place / "b.ckpt"))


def test_a_plugin_that_fails_while_looking_is_left_out(
    tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: Any, path: Any) -> bool:
        raise ValueError("planted")

    monkeypatch.setattr(Bare, "guess_can_open", failing)
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "b.ckpt")
    with caplog.at_level(logging.WARNING, logger="nnx.checkpoint"):
        assert open_checkpoint(tmp_path / "b.ckpt").format == "lightning"
    assert "Ignoring checkpoint format 'bare': planted" in caplog.text


# --- what lies below something that was found -----------------------------------------------------


def save(path: Path) -> Path:
    nnx_checkpoint.save(path, tensors={"model.w": shard_of(torch.ones(3))}, objects={"trainer": {}})
    return path


def foreign_safetensors(runs: Path) -> None:
    nnx_checkpoint.convert(save(runs / "source.ckpt"), runs / "weights.safetensors")


def foreign_dcp(runs: Path) -> None:
    nnx_checkpoint.convert(save(runs / "source.ckpt"), runs / "as_dcp", to="dcp")
    for file in (runs / "as_dcp").iterdir():
        file.rename(runs / file.name)
    (runs / "as_dcp").rmdir()


def foreign_deepspeed(runs: Path) -> None:
    (runs / "global_step1").mkdir(parents=True)
    torch.save({}, runs / "global_step1" / "mp_rank_00_model_states.pt")
    (runs / "latest").write_text("global_step1")


def foreign_colossalai(runs: Path) -> None:
    (runs / "model").mkdir(parents=True)
    (runs / "model" / "pytorch_model.bin.index.json").write_text("{}")
    (runs / "pytorch_optim.bin.index.json").write_text("{}")


def foreign_nnscaler(runs: Path) -> None:
    runs.mkdir(exist_ok=True)
    torch.save({"nnscaler-extra-state": 1}, runs / "0.pt")


def foreign_manifest(runs: Path) -> None:
    runs.mkdir(exist_ok=True)
    (runs / MANIFEST).write_text('{"name": "an app"}')


def foreign_nnx(runs: Path) -> None:
    save(runs)


def foreign_interrupted(runs: Path) -> None:
    (runs / "20200101T000000.000000-0123abcd").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "format"),
    [
        (foreign_safetensors, "safetensors"),
        (foreign_dcp, "dcp"),
        (foreign_deepspeed, "deepspeed"),
        (foreign_colossalai, "colossalai"),
        (foreign_nnscaler, "nnscaler"),
        (foreign_manifest, ""),
        (foreign_nnx, "nnx"),
        (foreign_interrupted, "nnx"),
    ],
)
def test_a_checkpoint_in_a_shared_directory_hides_nothing_below_it(
    tmp_path: Path, make: Callable[[Path], None], format: str
) -> None:
    runs = tmp_path / "runs"
    make(runs)
    shutil.rmtree(runs / "source.ckpt", ignore_errors=True)
    before = [(found.place.name, found.format) for found in survey(runs)]
    assert before == ([("runs", format)] if format else [])
    save(runs / "deep" / "a.ckpt")
    torch.save({"state_dict": {"w": torch.ones(2)}}, runs / "b.ckpt")
    partial = runs / ".c.0011aabb.nnx-partial"
    partial.write_bytes(b"x")
    os.utime(partial, (0, 0))
    found = {(found.place.name, found.format) for found in survey(runs)}
    assert found == {*before, ("a.ckpt", "nnx"), ("b.ckpt", "lightning"), (partial.name, "")}
    assert str(partial) in {item.path for item in collect_garbage(runs).removed}


def test_other_directories_of_one_format_are_checkpoints_of_their_own(tmp_path: Path) -> None:
    foreign_safetensors(tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    shutil.copy(tmp_path / "weights.safetensors", tmp_path / "checkpoint-500" / "model.safetensors")
    torch.save({}, tmp_path / "checkpoint-500" / "optimizer.pt")
    found = [found.place.name for found in survey(tmp_path) if found.format != "nnx"]
    assert found == [tmp_path.name, "checkpoint-500"]


@pytest.mark.full
def test_directories_nested_without_end_are_surveyed(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    here, top = Path.cwd(), tmp_path / "top"
    top.mkdir()
    os.chdir(top)
    for _ in range(500):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(here)
    try:
        sys.setrecursionlimit(400)
        assert list(survey(top)) == []
    finally:
        sys.setrecursionlimit(limit)
        subprocess.run(["rm", "-rf", str(top)], check=True)


def test_another_programs_manifest_does_not_make_a_checkpoint_ours(tmp_path: Path) -> None:
    foreign_manifest(tmp_path)
    assert not nnx_checkpoint.is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a checkpoint of a known format"):
        open_checkpoint(tmp_path)
    foreign_safetensors(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "weights.safetensors", tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"
