"""Conversion and merging between all formats are exact, atomic, and bounded in memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from jobs.foreign_jobs import resume_stock
from jobs.rich_checkpoint import differences, save_rich
from nnx_base.shard import Box, shard_of
from nnx_checkpoint.reading.formats import get_format, writable
from nnx_checkpoint.reading.slabs import SLAB, read_in_order, row_boxes
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.resume_jobs import run_cell
from nnx_test_helpers.training import Run

# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["lightning", "safetensors", "nnx"])
def test_our_format_comes_back_exactly_through_another(tmp_path: Path, to: str) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "other", to=to)
    nnx_checkpoint.convert(tmp_path / "other", tmp_path / "back", to="nnx")
    back = nnx_checkpoint.open_checkpoint(tmp_path / "back")
    assert back.format == "nnx"
    assert differences(source, back) == []
    assert nnx_checkpoint.verify(tmp_path / "back") == []


def test_a_checkpoint_without_tensors_is_converted_too(tmp_path: Path) -> None:
    nnx_checkpoint.save(tmp_path / "a", tensors={}, objects={"trainer": {"epoch": 1}})
    for to in ("nnx", "lightning"):
        nnx_checkpoint.convert(tmp_path / "a", tmp_path / to, to=to)
        opened = nnx_checkpoint.open_checkpoint(tmp_path / to)
        assert differences(nnx_checkpoint.open_checkpoint(tmp_path / "a"), opened) == []


def test_objects_without_json_form_are_refused_or_pickled(tmp_path: Path) -> None:
    content = {"state_dict": {"w": torch.ones(1)}, "hyper_parameters": {"x": os.PathLike}}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"'trainer\.hyper_parameters\.x' is a abc\.ABCMeta"):
        nnx_checkpoint.convert(tmp_path / "a.ckpt", tmp_path / "b", weights_only=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    nnx_checkpoint.convert(tmp_path / "a.ckpt", tmp_path / "b", weights_only=False, opaque="pickle")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "b", weights_only=False)
    assert opened.objects["trainer"]["hyper_parameters"]["x"] is os.PathLike


STEP, STEPS = 2, 3
MIXED = Run(optimizer="mixed", optimizers=3, steps=STEPS, options={"min_num_params": 100})


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of two ranks with AdamW in two groups, SGD and Adafactor, tied and frozen weights."""
    path = tmp_path_factory.mktemp("trained") / "sharded.ckpt"
    run = replace(MIXED, save=str(path), save_at=3 * STEP)
    return path, pool.run(run_cell, run, 3 * STEP, world_size=2)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp_find_unused_parameters_true", 2), ("ddp", 1), ("auto", 1)]
)
def test_a_merged_file_resumes_under_lightnings_own_strategies(
    pool: WorkerPool, tmp_path: Path, trained: tuple[Path, Any], strategy: str, devices: int
) -> None:
    path, saved = trained
    merged = tmp_path / "merged.ckpt"
    nnx_checkpoint.merge(path, merged)
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    run = replace(MIXED, strategy=strategy, options={}, devices=devices, resume=str(merged))
    for seen in pool.run(resume_stock, run, 3 * STEP, world_size=devices):
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("to", ["safetensors", "nnx", "lightning"])
def test_what_was_converted_resumes_under_a_sharded_strategy(
    pool: WorkerPool, tmp_path: Path, trained: tuple[Path, Any], to: str
) -> None:
    path, saved = trained
    nnx_checkpoint.convert(path, tmp_path / "other", to=to)
    run = replace(MIXED, resume=str(tmp_path / "other"))
    for seen in pool.run(run_cell, run, 3 * STEP, world_size=2):
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5)


# --- which format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "format"),
    [("a.ckpt", "lightning"), ("a.pt", "lightning"), ("a.safetensors", "safetensors"), ("a", "nnx")],
)
def test_the_format_is_guessed_from_the_targets_name(tmp_path: Path, target: str, format: str) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / target)
    assert nnx_checkpoint.open_checkpoint(tmp_path / target).format == format


def test_merging_gives_one_file(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.merge(tmp_path / "source", tmp_path / "merged")
    assert zipfile.is_zipfile(tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"would be a directory, and merging writes one file"):
        nnx_checkpoint.merge(tmp_path / "source", tmp_path / "b", to="safetensors")
    with pytest.raises(CheckpointError, match=r"format 'nnx' is a directory.*or `convert`"):
        nnx_checkpoint.merge(tmp_path / "source", tmp_path / "b", to="nnx")


def test_a_checkpoint_may_be_given_as_its_files(tmp_path: Path) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "st", to="safetensors", max_shard_size=100)
    files = sorted((tmp_path / "st").glob("*.safetensors"))
    nnx_checkpoint.merge(files, tmp_path / "merged.ckpt")
    assert differences(source, nnx_checkpoint.open_checkpoint(tmp_path / "merged.ckpt")) == []
    nnx_checkpoint.merge([str(tmp_path / "merged.ckpt")], tmp_path / "again.ckpt")
    with pytest.raises(CheckpointError, match=r"2 files are not one checkpoint: they are in 2 directories"):
        nnx_checkpoint.merge([files[0], tmp_path / "merged.ckpt"], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match=r"are not one checkpoint: '.*gone' is missing"):
        nnx_checkpoint.merge([tmp_path / "gone"], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="0 files are not one checkpoint"):
        nnx_checkpoint.merge([], tmp_path / "b.ckpt")


def test_options_that_a_format_does_not_have_are_refused(tmp_path: Path) -> None:
    save_rich(tmp_path / "a")
    with pytest.raises(CheckpointError, match="format 'nnx' has no option 'speed'"):
        nnx_checkpoint.convert(tmp_path / "a", tmp_path / "b", speed=3)


# --- complete or not at all -----------------------------------------------------------------------


@pytest.mark.parametrize("to", sorted({"lightning", "safetensors", "nnx"} & set(writable())))
def test_what_exists_is_refused_and_stays(tmp_path: Path, to: str) -> None:
    save_rich(tmp_path / "source")
    (tmp_path / "target").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot write '.*target': it exists already"):
        nnx_checkpoint.convert(tmp_path / "source", tmp_path / "target", to=to)
    assert (tmp_path / "target").read_text() == "mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("to", ["lightning", "safetensors", "nnx"])
def test_damage_in_the_source_leaves_nothing_behind(tmp_path: Path, to: str) -> None:
    source = save_rich(tmp_path / "source")
    file = next((tmp_path / "source").rglob("r00000.safetensors"))
    start = source.entry("model.net.weight").pieces[0].start
    raw = bytearray(file.read_bytes())
    raw[start + 100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"r00000\.safetensors' is damaged: .*'model\.net\.weight'"):
        nnx_checkpoint.convert(tmp_path / "source", tmp_path / "target", to=to)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.full
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = {"model.w": shard_of(torch.zeros(3 << 20))}
    nnx_checkpoint.save(tmp_path / "source", tensors=tensors, objects={"trainer": {}})
    script = """
        import resource, signal, sys
        import nnx_checkpoint
        from nnx_core.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for to in ("lightning", "safetensors", "nnx"):
            try:
                nnx_checkpoint.convert(sys.argv[1], sys.argv[2], to=to)
            except CheckpointError as error:
                print(to, error)
    """
    said = run(script, tmp_path / "source", tmp_path / "target")
    assert said.count("File too large") == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    tensors = {f"model.{i}": shard_of(torch.zeros(1 << 20)) for i in range(4)}
    nnx_checkpoint.save(tmp_path / "source", tensors=tensors, objects={"trainer": {}})
    for to in ("lightning", "safetensors", "nnx"):
        told: list[tuple[int, int]] = []
        nnx_checkpoint.convert(
            tmp_path / "source", tmp_path / to, to=to, progress=lambda *now, told=told: told.append(now)
        )
        assert told[-1] == (16 << 20, 16 << 20), to
        assert told == sorted(told)
        assert len(told) > 3


# --- in bounded memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4), (3, 1, 5), (2, 3, 4), (1, 1, 9)])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100])
def test_row_boxes_follow_each_other_and_are_small(shape: tuple[int, ...], limit: int) -> None:
    numbers = (
        torch.arange(max(1, torch.Size(shape).numel())).view(shape) if 0 not in shape else torch.zeros(shape)
    )
    boxes = list(row_boxes(shape, 1, limit))
    read = list(itertools.chain.from_iterable(numbers[box.slices].reshape(-1).tolist() for box in boxes))
    assert read == numbers.reshape(-1).tolist()
    assert all(box.numel <= limit for box in boxes)
    assert boxes[0] == Box.whole(shape) or torch.Size(shape).numel() > limit


def test_reading_in_order_gives_every_byte_of_large_and_small_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "big": torch.randn(3, SLAB // 4 // 2 + 13),
        "empty": torch.zeros(0, 2),
        "one": torch.tensor(1.5),
    }
    tensors |= {f"small.{i}": torch.randn(100, 7).bfloat16() for i in range(50)}
    shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
    nnx_checkpoint.save(tmp_path / "a", tensors=shards, objects={})
    names = ["small.7", "big", "empty", *(f"small.{i}" for i in range(20)), "one"]
    names.remove("small.7")
    read: dict[str, bytes] = {}
    for part in read_in_order(nnx_checkpoint.open_checkpoint(tmp_path / "a"), names):
        time.sleep(0.02)  # what is read ahead meanwhile must go elsewhere
        read[part.name] = read.get(part.name, b"") + bytes(part.data)
        assert len(part.data) <= SLAB
    assert list(read) == names
    for name, raw in read.items():
        assert (
            raw == bytes(tensors[name].reshape(-1).view(torch.uint8).numpy())
            if tensors[name].numel()
            else not raw
        )


def run(script: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_converting_takes_at_most_64_megabytes(tmp_path: Path) -> None:
    """180 MB, of which one tensor is 150 MB, in a process that could not hold either."""
    sizes = {"big": (3000, 12500), **{f"part{i}": (500, 1000) for i in range(15)}}
    tensors = {f"model.{name}": shard_of(torch.ones(size)) for name, size in sizes.items()}
    nnx_checkpoint.save(tmp_path / "large", tensors=tensors, objects={"trainer": {}, "extra": {}})
    script = """
        import resource, sys, threading
        import torch
        import lightning.fabric.utilities.data
        import nnx_checkpoint
        from nnx_checkpoint.reading import formats
        formats.writable(), formats.find_format(sys.argv[1])
        threading.stack_size(1 << 20)  # addresses are limited: 8 MB of them for a thread are no memory
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for to in ("lightning", "safetensors", "nnx"):
            nnx_checkpoint.convert(sys.argv[1], f"{sys.argv[2]}.{to}", to=to)
        try:
            torch.zeros(150_000_000, dtype=torch.uint8)
        except RuntimeError as error:
            print(error)
    """
    assert "can't allocate memory" in run(script, tmp_path / "large", tmp_path / "out")
    for to in ("lightning", "safetensors", "nnx"):
        opened = nnx_checkpoint.open_checkpoint(tmp_path / f"out.{to}")
        assert opened.read("model.big", Box((2999, 12490), (1, 10))).tolist() == [[1.0] * 10]
        assert opened.entry("model.big").nbytes == 150_000_000


def test_every_writer_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No single read is larger than a slab, for all pairs of formats."""
    source = tmp_path / "source"
    nnx_checkpoint.save(
        source,
        tensors={"model.w": shard_of(torch.zeros(3 * SLAB // 4))},
        objects={"trainer": {}, "extra": {}},
    )
    largest: list[int] = []
    fetch = nnx_checkpoint.Checkpoint.fill

    def measured(self: Any, shards: Any) -> None:
        largest.append(sum(shard.nbytes for shard in shards.values()))
        fetch(self, shards)

    monkeypatch.setattr(nnx_checkpoint.Checkpoint, "fill", measured)
    for to in ("lightning", "safetensors", "nnx"):
        get_format(to).write(nnx_checkpoint.open_checkpoint(source), tmp_path / to)
    assert 0 < max(largest) <= SLAB


@pytest.mark.full
def test_merging_many_times_takes_no_more_address_space(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.6"}, file)
    code = f"""
        import os, nnx_checkpoint
        def size():
            return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        for number in range(25):
            nnx_checkpoint.merge({str(file)!r}, {str(tmp_path / "merged.ckpt")!r})
            os.remove({str(tmp_path / "merged.ckpt")!r})
            before = size() if number == 4 else before if number else 0
        print(size() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32 << 20
