"""Saving in the background: snapshots are exact and in order, and no error or checkpoint is lost."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nnx
import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.format import inflight
from nnx_checkpoint.writing import background
from nnx_checkpoint.writing.copy import Arena
from nnx_checkpoint.writing.writer import save
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers import async_jobs, checkpoint_jobs


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Background saves begin when it is set."""
    opened = threading.Event()
    try:
        with async_jobs.delayed(lambda: opened.wait(30)):
            yield opened
    finally:
        opened.set()
        inflight.take_error()


def state(value: int, **more: Any) -> dict[str, Any]:
    return {"tensors": {"w": shard_of(torch.full((1000,), value))}, "objects": {"v": value}, **more}


def version(path: Path) -> int:
    stored = nnx_checkpoint.open_checkpoint(path)
    (value,) = set(stored.read("w").tolist())
    assert stored.objects["v"] == value
    return int(value)


def in_the_way(path: Path) -> Path:
    path.write_text("not a directory")
    return path


# --- the snapshot -------------------------------------------------------------------------------------


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


def test_nothing_that_changes_after_the_call_shows(tmp_path: Path, gate: threading.Event) -> None:
    weight, lifted, array = torch.ones(5, requires_grad=True), torch.ones(2), np.ones(3)
    opaque, inner, aliases = Opaque(1), {"list": [1]}, {"tied": "w"}
    objects = {"lifted": lifted, "array": array, "inner": inner, "opaque": opaque}
    provenance, rank_objects = {"from": ["here"]}, {"rng": torch.ones(4), "n": [1]}
    save = nnx_checkpoint.save_async(
        nnx_checkpoint.SaveRequest(
            tmp_path / "a",
            tensors={"w": shard_of(weight)},
            objects=objects,
            rank_objects=rank_objects,
            aliases=aliases,
            provenance=provenance,
            opaque="pickle",
        )
    )
    with torch.no_grad():
        for tensor in (weight, lifted, rank_objects["rng"]):
            tensor.fill_(2)
    array.fill(2)
    inner["list"].append(2)
    opaque.value = 2
    aliases.clear()
    provenance["from"].append("there")
    rank_objects["n"].append(2)
    gate.set()
    save.wait()
    stored = nnx_checkpoint.open_checkpoint(tmp_path / "a", weights_only=False)
    assert stored.read("tied").tolist() == [1.0] * 5
    assert stored.objects["lifted"].tolist() == [1.0, 1.0]
    assert stored.objects["array"].tolist() == [1.0, 1.0, 1.0]
    assert stored.objects["inner"] == {"list": [1]}
    assert stored.objects["opaque"].value == 1
    assert stored.provenance == {"from": ["here"]}
    own = stored.rank_objects(0)
    assert own["rng"].tolist() == [1.0] * 4
    assert own["n"] == [1]


def test_the_copy_has_the_same_bits_whatever_the_tensor() -> None:
    full = {name: tensor for name, (tensor, _) in checkpoint_jobs.full_tensors().items()}
    odd = {
        "transposed": torch.randn(6, 7).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.complex(torch.randn(3), torch.randn(3)).conj(),
        "negative": torch.complex(torch.randn(3), torch.randn(3)).conj().imag,
        "gradient": torch.randn(3, requires_grad=True),
    }
    with torch.inference_mode():
        odd["inference"] = torch.randn(4)
    sources = full | odd
    staged = Arena().stage({name: shard_of(tensor) for name, tensor in sources.items()})
    for name, tensor in sources.items():
        (copy,) = staged[name].data
        expected = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert checkpoint_jobs.same_bits(copy, expected), name
        assert not copy.numel() or copy.data_ptr() != tensor.data_ptr(), name


def test_the_copy_uses_the_same_memory_every_time_and_grows_when_it_must() -> None:
    arena = Arena()
    first = arena.stage({"a": shard_of(torch.ones(1000)), "b": shard_of(torch.tensor(1))})
    where, size = first["a"].data[0].data_ptr(), arena.nbytes
    again = arena.stage({"a": shard_of(torch.full((1000,), 2.0)), "b": shard_of(torch.tensor(2))})
    assert again["a"].data[0].data_ptr() == where
    assert again["a"].data[0].tolist() == [2.0] * 1000
    other = arena.stage({"c": shard_of(torch.arange(500, dtype=torch.float64))})
    assert (other["c"].data[0].data_ptr(), arena.nbytes) == (where, size)
    assert other["c"].data[0].tolist() == list(range(500))
    arena.stage({"d": shard_of(torch.ones(2000))})
    assert arena.nbytes == 8000


def test_a_copy_made_in_inference_mode_serves_outside_of_it() -> None:
    arena = Arena()
    shards = {"a": shard_of(torch.ones(3))}
    with torch.inference_mode():
        arena.stage(shards)
    assert arena.stage(shards)["a"].data[0].tolist() == [1.0, 1.0, 1.0]


def test_what_cannot_be_saved_is_refused_as_it_is_without_background(tmp_path: Path) -> None:
    refused = [
        ({"tensors": {"w": shard_of(torch.ones(3, device="meta"))}}, "is on the meta device and has no data"),
        ({"tensors": {"w": shard_of(torch.ones(3).to(torch.complex32))}}, "dtype complex32, which a checkp"),
        ({"objects": {"x": object()}}, "the object at 'x' is a builtins.object, which has no safe encoding"),
        ({"state_dict_type": "full"}, "unknown state_dict_type 'full'"),
    ]
    for fault, message in refused:
        with pytest.raises(CheckpointError, match=message):
            nnx_checkpoint.save_async(
                nnx_checkpoint.SaveRequest(tmp_path / "a", **{**state(1), **fault})
            ).wait()
        assert inflight.current() is None
        assert not (tmp_path / "a").exists()


# --- one at a time ------------------------------------------------------------------------------------


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "action",
    [
        lambda path: nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(path, **state(2))).wait(),
        lambda path: nnx_checkpoint.save(path, **state(2)),
        lambda path: nnx.CheckpointIO(async_save=True).load_checkpoint(path),
        lambda path: nnx.CheckpointIO().teardown(),
        lambda path: nnx.CheckpointIO().wait(),
    ],
    ids=["save_async", "save", "load", "teardown", "wait"],
)
def test_what_follows_waits_for_the_save_in_flight(
    tmp_path: Path, gate: threading.Event, action: Callable[[Path], object]
) -> None:
    path = tmp_path / "a"
    first = nnx_checkpoint.save_async(
        nnx_checkpoint.SaveRequest(path, objects={"v": 1, "trainer": {}}, tensors=state(1)["tensors"])
    )
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    action(path)
    timer.join()
    assert first.done()
    assert version(path) in (1, 2)
    assert inflight.current() is None


@pytest.mark.parametrize("name", ["a", "link", "../{}/a"])
@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (nnx_checkpoint.is_checkpoint, True),
        (nnx_checkpoint.verify, []),
        (lambda path: nnx_checkpoint.open_checkpoint(path).objects, {"v": 1}),
    ],
    ids=["is_checkpoint", "verify", "open"],
)
def test_reading_what_is_being_saved_waits_for_it(
    tmp_path: Path, gate: threading.Event, name: str, read: Callable[[Path], Any], answer: Any
) -> None:
    (tmp_path / "link").symlink_to("a")
    nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "a", **state(1)))
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    assert read(tmp_path / name.format(tmp_path.name)) == answer
    timer.join()


def test_reading_something_else_does_not_wait(tmp_path: Path, gate: threading.Event) -> None:
    nnx_checkpoint.save(tmp_path / "b", **state(3))
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "a", **state(1)))
    assert version(tmp_path / "b") == 3
    assert not save.done()


def test_the_name_is_taken_at_once(tmp_path: Path, gate: threading.Event) -> None:
    nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "new" / "a", **state(1)))
    assert (tmp_path / "new" / "a").is_dir()


# --- errors -------------------------------------------------------------------------------------------


def test_an_error_is_raised_by_wait_every_time_and_by_nothing_else(tmp_path: Path) -> None:
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(in_the_way(tmp_path / "a"), **state(1)))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot save to '.*/a': it is a file"):
            save.wait()
    assert save.done()
    nnx_checkpoint.save(tmp_path / "b", **state(1))


@pytest.mark.parametrize("follow", [save, nnx_checkpoint.save_async])
def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save(tmp_path: Path, follow: Any) -> None:
    nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(in_the_way(tmp_path / "a"), **state(1)))
    with pytest.raises(CheckpointError, match=r"cannot save to '.*/a': it is a file"):
        follow(nnx_checkpoint.SaveRequest(tmp_path / "b", **state(2)))
    assert not (tmp_path / "b").exists()
    follow(nnx_checkpoint.SaveRequest(tmp_path / "b", **state(3)))
    inflight.settle()
    assert version(tmp_path / "b") == 3


def test_polling_raises_once_when_the_save_has_ended(tmp_path: Path, gate: threading.Event) -> None:
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(in_the_way(tmp_path / "a"), **state(1)))
    background.poll()
    gate.set()
    save._thread.join()
    with pytest.raises(CheckpointError, match="it is a file"):
        background.poll()
    background.poll()


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nnx_checkpoint.save(tmp_path / "a", **state(1))
    with pytest.raises(CheckpointError, match="target must be stored"):
        nnx_checkpoint.save_async(
            nnx_checkpoint.SaveRequest(tmp_path / "a", **state(2), aliases={"x": "nowhere"})
        ).wait()
    assert version(tmp_path / "a") == 1


SCRIPT = """
import sys, time, torch, nnx_checkpoint
from nnx_checkpoint.writing.writer import Save
from nnx_base.shard import shard_of
complete = Save.complete
Save.complete = lambda self: (time.sleep(0.5), complete(self))
tensors = {"w": shard_of(torch.full((1000,), 7))}
nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(sys.argv[1], tensors=tensors, objects={"v": 7}))
"""


@pytest.mark.full
def test_python_waits_for_the_save_at_exit_and_says_if_it_failed(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for path in (tmp_path / "a", in_the_way(tmp_path / "b"))
    ]
    good, bad = (run.communicate(timeout=120)[1] for run in runs)
    assert version(tmp_path / "a") == 7
    assert good == ""
    assert f"Background save to '{tmp_path / 'b'}' failed: cannot save to" in bad


def test_a_save_that_outlasts_the_program_needs_no_further_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    values = torch.arange(5_000_000)  # more than all buffers of the writer
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(values)}, objects={})
    monkeypatch.undo()
    assert nnx_checkpoint.verify(tmp_path / "a") == []
    assert torch.equal(nnx_checkpoint.open_checkpoint(tmp_path / "a").read("w"), values)


# --- removal ------------------------------------------------------------------------------------------


def test_a_removal_waits_for_the_commit(tmp_path: Path, gate: threading.Event) -> None:
    io = nnx.CheckpointIO(async_save=True)
    nnx_checkpoint.save(tmp_path / "old", **state(1))
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "new", **state(2)))
    io.remove_checkpoint(tmp_path / "old")
    assert version(tmp_path / "old") == 1
    gate.set()
    save.wait()
    assert not (tmp_path / "old").exists()
    assert version(tmp_path / "new") == 2


@pytest.mark.parametrize("when", ["in flight", "ended"])
def test_a_removal_behind_a_save_that_failed_is_skipped(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    nnx_checkpoint.save(tmp_path / "old", **state(1))
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(in_the_way(tmp_path / "new"), **state(2)))
    if when == "ended":
        gate.set()
        save._thread.join()
    with caplog.at_level(logging.WARNING, logger="nnx.checkpoint"):
        nnx.CheckpointIO().remove_checkpoint(tmp_path / "old")
        gate.set()
        with pytest.raises(CheckpointError, match="it is a file"):
            save.wait()
    assert f"Skipped removing '{tmp_path / 'old'}': saving '{tmp_path / 'new'}' failed" in caplog.text
    assert version(tmp_path / "old") == 1
    nnx.CheckpointIO().remove_checkpoint(tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_a_removal_never_takes_what_was_saved_after_it(tmp_path: Path, gate: threading.Event) -> None:
    io = nnx.CheckpointIO(async_save=True)
    nnx_checkpoint.save(tmp_path / "a", **state(1))
    nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "b", **state(2)))
    io.remove_checkpoint(tmp_path / "a")
    threading.Timer(0.1, gate.set).start()
    nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "a", **state(3))).wait()
    assert (version(tmp_path / "a"), version(tmp_path / "b")) == (3, 2)


def test_a_removal_that_fails_is_logged(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    save = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(tmp_path / "a", **state(1)))

    def fail() -> None:
        raise OSError("busy")

    inflight.after_save("removing 'x'", fail)
    gate.set()
    save.wait()
    assert "removing 'x' failed: busy" in caplog.text
    assert version(tmp_path / "a") == 1


# --- several ranks ------------------------------------------------------------------------------------


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_save_what_they_had_when_they_were_asked(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    path = str(tmp_path / "a")
    held = pool.run(async_jobs.save_and_change, path, world_size=world_size, init="gloo")
    assert held == [True] * world_size
    assert nnx_checkpoint.verify(path) == []
    assert pool.run(checkpoint_jobs.load_all, path, world_size=2, init="gloo") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["file size limit", "shape", "gap", "opaque", "name"])
def test_a_fault_on_one_rank_is_raised_by_wait_on_all(pool: WorkerPool, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    expected = pool.run(checkpoint_jobs.attempt, str(path), fault, world_size=2, init="gloo")
    first, second = pool.run(async_jobs.attempt, str(path), fault, world_size=2, init="gloo")
    assert first == second
    assert first[0] is None and first[1] is not None and expected[0] is not None
    assert _without_ids(first[1][1]) == _without_ids(expected[0][1])
    assert pool.run(checkpoint_jobs.load_all, str(path), world_size=2, init="gloo") == [[], []]


def _without_ids(text: str) -> str:
    return re.sub(r"/20\d{6}T[^/']*", "/ID", text)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_all_ranks_notice_the_end_at_the_same_poll(
    pool: WorkerPool, tmp_path: Path, slow_rank: int, fail: bool
) -> None:
    first, second = pool.run(
        async_jobs.poll_until_noticed, str(tmp_path / "a"), slow_rank, fail, world_size=2, init="gloo"
    )
    assert first == second
    assert first[0] > 3
    assert ("complex32" in first[1]) == fail


def test_an_error_that_one_rank_alone_has_left_reaches_all_in_the_next_save(
    pool: WorkerPool, tmp_path: Path
) -> None:
    first, second = pool.run(async_jobs.alone_then_together, str(tmp_path), world_size=2, init="gloo")
    assert first == second
    assert first[0] is not None and "failed on rank 0: cannot save to" in first[0][1]
    assert first[1] is None


@pytest.mark.full
def test_collectives_of_training_and_of_the_save_do_not_meet(pool: WorkerPool, tmp_path: Path) -> None:
    one = pool.run(async_jobs.train_meanwhile, str(tmp_path / "a"), 1, world_size=3, init="gloo")
    assert [wrong for _, wrong in one] == [[], [], []]
    many = pool.run(async_jobs.train_meanwhile, str(tmp_path / "b"), 10, world_size=2, init="gloo")
    assert many[0][0] == many[1][0] > 20
    assert nnx_checkpoint.open_checkpoint(tmp_path / "b").objects["version"] == 10


def test_a_rank_that_dies_during_a_background_save_is_an_error_on_the_others(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    pool.run(checkpoint_jobs.save_all, path, "deduped", world_size=2, init="gloo")
    with pytest.raises(JobError, match="died with exit code 9") as caught:
        pool.run(async_jobs.leave_during_save, path, world_size=2, init="gloo", timeout=60)
    assert list(caught.value.failures) == [1]  # rank 0 got a CheckpointError and returned
    assert nnx_checkpoint.open_checkpoint(path).objects["version"] == 1
