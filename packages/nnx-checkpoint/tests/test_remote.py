"""Checkpoints at URLs: on a real S3 server, and in memory where one process is enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import nnx_checkpoint
from jobs import remote_jobs, remote_training_jobs
from jobs.remote_jobs import Unreachable, keys
from nnx_base.shard import Box, shard_of
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.manifest import Manifest
from nnx_checkpoint.reading.fetching import Fetcher, PlainFiles, Wanted
from nnx_checkpoint.storage import remote
from nnx_checkpoint.storage.locations import LocalPlace, place_of
from nnx_checkpoint.writing.transaction import begin
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers import checkpoint_jobs
from nnx_test_helpers.training import Run


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with remote_jobs.s3_server() as environment:
        yield environment


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty store of this process."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield "memory://bucket/run/a.ckpt"
    store.clear()


def save(path: str, value: int, **more: Any) -> None:
    tensors = {"w": shard_of(torch.full((1000,), value)), "b": shard_of(torch.tensor(value))}
    nnx_checkpoint.save(path, tensors=tensors, objects={"value": value}, **more)


def check(path: str) -> int:
    assert nnx_checkpoint.verify(path) == []
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    value: int = checkpoint.objects["value"]
    assert checkpoint.read("w").tolist() == [value] * 1000
    assert checkpoint.read("b") == value
    return value


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["runs/a", "/runs/a", Path("/runs/a"), "file:///runs/a", "C:a"])
def test_paths_are_local(location: Any) -> None:
    assert isinstance(place_of(location), LocalPlace)
    assert str(place_of(location)) == str(location).removeprefix("file://")


def test_a_url_keeps_its_form_whatever_is_asked_of_it() -> None:
    place = place_of("memory://bucket/a.ckpt/")
    assert place.location == str(place) == "memory://bucket/a.ckpt"
    assert str(place / "x") == "memory://bucket/a.ckpt/x"
    assert (place.name, (place / "x").name) == ("a.ckpt", "x")
    assert place_of(place) is place


@pytest.mark.parametrize("name", ["open_native", "verify", "is_checkpoint"])
def test_urls_that_nothing_can_open_are_refused_with_the_way_out(name: str) -> None:
    function = getattr(nnx_checkpoint, name)
    with pytest.raises(
        CheckpointError, match=r"cannot open 's4://x/y': fsspec .* knows no protocol 's4'. Use"
    ):
        function("s4://x/y")
    with pytest.raises(
        CheckpointError, match=r"the package gcsfs is not installed. Install it with `pip inst"
    ):
        function("gs://x/y")
    with pytest.raises(CheckpointError, match=r"cannot open 'dropbox://x/y': .*dropboxdrivefs"):
        function("dropbox://x/y")
    with pytest.raises(
        CheckpointError, match=r"'s3:/x/y' was a URL, and pathlib removed a slash of it. Pass"
    ):
        function(Path("s3://x/y"))


def test_a_url_is_replaced_and_the_old_save_collected(memory: str) -> None:
    for value in range(3):
        save(memory, value)
        assert check(memory) == value
    save_id = nnx_checkpoint.open_native(memory).manifest.save_id
    assert {key.split("/")[0] for key in keys(memory)} == {"manifest.json", save_id}
    assert nnx_checkpoint.open_checkpoint(memory).path == memory


def test_earlier_saves_at_a_url_can_be_kept(memory: str) -> None:
    ids = []
    for value in range(4):
        save(memory, value, keep_previous=1)
        ids.append(nnx_checkpoint.open_native(memory).manifest.save_id)
    assert {key.split("/")[0] for key in keys(memory)} == {"manifest.json", *ids[2:]}


def test_nothing_at_a_url_is_no_checkpoint(memory: str) -> None:
    assert not nnx_checkpoint.is_checkpoint(memory)
    with pytest.raises(CheckpointError, match=r"is not an nnx checkpoint: there is no such directory"):
        nnx_checkpoint.verify(memory)


def test_other_things_at_a_url_are_left_alone(memory: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{memory}/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"it holds other files, such as 'notes.txt'"):
        save(memory, 1)
    with pytest.raises(CheckpointError, match=r"cannot save to '.*/notes.txt': it is a file"):
        save(f"{memory}/notes.txt", 1)
    assert keys(memory) == {"notes.txt"}


def test_damage_at_a_url_is_found_and_not_loaded(memory: str) -> None:
    save(memory, 1)
    store = fsspec.filesystem("memory")
    for key in sorted(keys(memory)):
        raw = store.cat_file(f"{memory}/{key}")
        for position in (0, len(raw) // 2, len(raw) - 1):
            flipped = bytearray(raw)
            flipped[position] ^= 1
            store.pipe_file(f"{memory}/{key}", bytes(flipped))
            assert nnx_checkpoint.verify(memory), (key, position)
        store.pipe_file(f"{memory}/{key}", raw[:-1])
        assert nnx_checkpoint.verify(memory), key
        store.rm(f"{memory}/{key}")
        if key != "manifest.json":
            assert nnx_checkpoint.verify(memory), key
        store.pipe_file(f"{memory}/{key}", raw)
    assert check(memory) == 1


def test_a_store_that_is_lost_at_any_moment_keeps_the_old_checkpoint_or_has_the_new_one(memory: str) -> None:
    save(memory, 0)
    url, steps, outcomes = memory.replace("memory", "unreachable"), 0, []
    while True:
        Unreachable.left = steps
        try:
            save(url, len(outcomes) + 1)
        except CheckpointError as error:
            assert "planted" in str(error)
        finished, Unreachable.left = Unreachable.left >= 0, None
        found = check(memory)
        expected = outcomes[-1] if outcomes else 0
        assert found in (expected, len(outcomes) + 1)
        outcomes.append(found)
        steps += 1
        if finished:
            break
    assert steps > 10
    assert outcomes.count(0) > 5  # the first steps commit nothing
    assert len(set(outcomes)) > 2  # from the commit on, the new one is there


def test_the_manifest_is_what_is_written_last(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = {name: getattr(remote.UrlPlace, name) for name in ("write", "stream")}

    def note(name: str) -> Any:
        def noted(self: remote.UrlPlace, argument: Any) -> Any:
            written.append(str(self))
            return real[name](self, argument)

        return noted

    for name in real:
        monkeypatch.setattr(remote.UrlPlace, name, note(name))
    save(memory, 1, rank_objects={"x": 1})
    assert len(written) == 7
    assert written[-1] == f"{memory}/manifest.json"
    assert written[-2].endswith("/manifest.json")


# --- two runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_a_save_that_another_run_overtook_is_given_up_and_nothing_is_lost(memory: str, times: int) -> None:
    save(memory, 1)
    slow = begin(place_of(memory))
    (slow.directory / "r00000.safetensors").write(b"in progress")
    for number in range(times):
        save(memory, 2 + number)
        if number == 0:
            assert any(slow.save_id in key for key in keys(memory))  # it may still be in progress
    overtaken = r"cannot commit to '.*': another run has saved to it meanwhile"
    with pytest.raises(CheckpointError, match=overtaken):
        slow.commit(Manifest(slow.save_id, "", {}), keep_previous=0)
    slow.discard()
    assert check(memory) == 1 + times
    assert not any(slow.save_id in key for key in keys(memory))


def test_what_a_killed_save_left_at_a_url_is_collected_later(memory: str) -> None:
    save(memory, 1)
    killed = begin(place_of(memory))
    (killed.directory / "r00000.safetensors").write(b"in progress")
    save(memory, 2)
    save(memory, 3)
    assert not any(killed.save_id in key for key in keys(memory))


# --- requests ------------------------------------------------------------------------------------


def test_many_small_tensors_take_few_requests(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i}": torch.full((100,), i) for i in range(300)}
    nnx_checkpoint.save(memory, tensors={k: shard_of(v) for k, v in tensors.items()}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(memory)
    requests = []
    real = remote.UrlReader._request

    def counted(self: remote.UrlReader, start: int, stop: int) -> bytes:
        requests.append((start, stop))
        return real(self, start, stop)

    monkeypatch.setattr(remote.UrlReader, "_request", counted)
    filled = {name: torch.zeros(100, dtype=torch.int64) for name in tensors}
    checkpoint.fill({name: shard_of(value) for name, value in filled.items()})
    assert all(torch.equal(filled[name], value) for name, value in tensors.items())
    assert len(requests) == 1
    assert not remote._chunks._kept


def test_large_reads_are_one_request_each_and_chunks_are_not_kept_for_ever(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_CHUNK", 1000)
    monkeypatch.setattr(remote, "_KEPT_CHUNKS", 3)
    data = torch.arange(10_000, dtype=torch.uint8).numpy().tobytes()
    place = place_of(memory) / "x"
    place.write(data)
    reader = place.reader()
    for start, length in ((0, 10_000), (1, 1), (999, 2), (2500, 999), (7000, 3000), (9990, 10), (3, 0)):
        target = memoryview(bytearray(length))
        reader.read_into(start, target)
        assert bytes(target) == data[start : start + length]
    assert len(remote._chunks._kept) == 3
    for start, length in ((9990, 11), (0, 10_001), (20_000, 1)):
        with pytest.raises(CheckpointError, match=r"/x' is truncated: it ends at byte .*, \d+ were expected"):
            reader.read_into(start, memoryview(bytearray(length)))
    reader.close()
    assert not remote._chunks._kept


def test_files_of_other_programs_are_read_from_urls(memory: str) -> None:
    tensor = torch.arange(20.0)
    (place_of(memory) / "x.bin").write(b"head" + tensor.numpy().tobytes())
    entry = TensorEntry("w", (20,), "float32", (Piece(Box.whole((20,)), "x.bin", 4, 80),))
    into = torch.zeros(5)
    Fetcher(PlainFiles(memory)).fetch([Wanted(entry, Box((3,), (5,)), into)])
    assert into.tolist() == [3, 4, 5, 6, 7]
    absolute = TensorEntry("w", (20,), "float32", (Piece(Box.whole((20,)), f"{memory}/x.bin", 4, 80),))
    Fetcher(PlainFiles("/elsewhere")).fetch([Wanted(absolute, Box((0,), (5,)), into)])
    assert into.tolist() == [0, 1, 2, 3, 4]


# --- a real server -------------------------------------------------------------------------------


def test_two_processes_save_to_s3_and_any_number_load(pool: WorkerPool, s3: dict[str, str]) -> None:
    url = "s3://bucket/two/a.ckpt"
    for _ in range(2):
        pool.run(checkpoint_jobs.save_all, url, "deduped", world_size=2, init="gloo", env=s3)
    assert nnx_checkpoint.verify(url) == []
    save_id = nnx_checkpoint.open_native(url).manifest.save_id
    assert {key.split("/")[0] for key in keys(url)} == {"manifest.json", save_id}
    for size in (1, 3):
        found = pool.run(checkpoint_jobs.load_all, url, world_size=size, init="gloo", env=s3)
        assert found == [[]] * size


@pytest.mark.full
def test_a_large_file_goes_to_s3_in_parts(s3: dict[str, str]) -> None:
    url = "s3://bucket/large.ckpt"
    tensor = torch.randn(11 << 20)  # 44 MiB: three parts
    nnx_checkpoint.save(url, tensors={"w": shard_of(tensor)}, objects={})
    assert torch.equal(nnx_checkpoint.open_checkpoint(url).read("w"), tensor)
    assert nnx_checkpoint.verify(url) == []


def test_a_fault_on_one_rank_leaves_nothing_at_s3(pool: WorkerPool, s3: dict[str, str]) -> None:
    url = "s3://bucket/fault/a.ckpt"
    first, second = pool.run(checkpoint_jobs.attempt, url, "opaque", world_size=2, init="gloo", env=s3)
    assert first == second
    assert first is not None
    assert "failed on rank 1: the object at 'sampler'" in first[1]
    assert keys(url) == set()


def test_an_upload_that_fails_is_abandoned(s3: dict[str, str]) -> None:
    place = place_of("s3://bucket/abandoned")
    with pytest.raises(RuntimeError), place.stream(40 << 20) as stream:
        stream.append(memoryview(bytes(20 << 20)))
        raise RuntimeError
    assert place.kind() is None
    filesystem = fsspec.filesystem("s3")
    assert "Uploads" not in filesystem.call_s3("list_multipart_uploads", Bucket="bucket")


def test_a_rank_killed_while_saving_to_s3_leaves_the_old_checkpoint(
    pool: WorkerPool, s3: dict[str, str]
) -> None:
    url = "s3://bucket/killed/a.ckpt"
    pool.run(checkpoint_jobs.save_all, url, "deduped", world_size=2, init="gloo", env=s3)
    with pytest.raises(JobError, match="died with exit code 9"):
        pool.run(checkpoint_jobs.leave_during_save, url, world_size=2, init="gloo", env=s3, timeout=60)
    assert nnx_checkpoint.verify(url) == []
    assert nnx_checkpoint.open_checkpoint(url).objects["version"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "run", [Run(options={"min_num_params": 100}), Run(strategy="ddp")], ids=["fsdp_auto", "ddp"]
)
def test_trainer_saves_to_s3_removes_what_it_should_and_resumes_from_there(
    pool: WorkerPool, s3: dict[str, str], run: Run
) -> None:
    url = f"s3://bucket/{run.strategy}"
    for whole, parts, path in pool.run(
        remote_training_jobs.train_and_resume, run, url, world_size=2, env=s3, timeout=150
    ):
        assert parts == whole
        assert path == f"{url}/parts/last.ckpt"
    for part in ("whole", "parts"):
        left = {key.split("/")[0] for key in keys(f"{url}/{part}")}
        assert left == {"epoch=0-step=3.ckpt", "last.ckpt"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        (
            "s3://nowhere/a",
            {},
            r"'s3://nowhere/a/.*': The specified bucket does not exist. .*Create",
        ),
        (
            "s3://bucket/a",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"},
            r"'s3://bucket/a': Unable to locate credentials. .*Check the credentials",
        ),
        (
            "s3://bucket/a",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"},
            r"'s3://bucket/a': Could not connect to the endpoint URL.* Check the network and the endpoint",
        ),
    ],
)
def test_what_s3_refuses_is_the_same_clear_error_on_every_rank(
    pool: WorkerPool, s3: dict[str, str], url: str, environment: dict[str, str], message: str
) -> None:
    first, second = pool.run(
        remote_jobs.refusal, url, world_size=2, init="gloo", env={**s3, **environment}, timeout=60
    )
    assert first == second
    assert first[0] == "CheckpointError"
    assert re.search(message, first[1]), first[1]
