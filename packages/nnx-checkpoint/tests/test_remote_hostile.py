"""Faults of an S3 server and its bucket raise a clear error, and no committed checkpoint is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

import nnx_checkpoint
from jobs import remote_jobs
from nnx_base.shard import shard_of
from nnx_checkpoint.storage import remote
from nnx_checkpoint.storage.locations import place_of
from nnx_checkpoint.writing.collecting import collect_garbage
from nnx_checkpoint.writing.transaction import begin
from nnx_core.errors import CheckpointError

ODD_NAMES = ["../outside", "..", "a/../../b", "x\x1b]0;owned\x07", "20200101T000000.000000-deadbeef/../b"]


class Liar(MemoryFileSystem):  # type: ignore[misc]
    """A store that reports given wrong sizes."""

    protocol = "liar"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    listed: Any = None
    known: Any = "right"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = super().ls(path, detail=True, **kwargs)
        return [{**entry, "size": self.listed} if entry["type"] == "file" else entry for entry in found]

    def info(self, path: str, **kwargs: Any) -> Any:
        found = super().info(path, **kwargs)
        return found if self.known == "right" else {**found, "size": self.known}


@pytest.fixture
def liar() -> Iterator[type[Liar]]:
    fsspec.register_implementation("liar", Liar, clobber=True)
    yield Liar
    Liar.store.clear()
    Liar.listed, Liar.known = None, "right"


def test_a_listing_without_sizes_is_no_damage(liar: type[Liar]) -> None:
    save("liar://runs/a.ckpt", 3)  # as of https://
    check("liar://runs/a.ckpt", 3)
    assert collect_garbage("liar://runs").removed == []


@pytest.mark.parametrize("size", ["x", None, -1, 1.5, True])
def test_sizes_that_nobody_can_believe_are_an_error_of_ours(liar: type[Liar], size: Any) -> None:
    save("liar://runs/a.ckpt", 3)
    liar.listed = liar.known = size
    for use in (nnx_checkpoint.open_checkpoint, nnx_checkpoint.verify):
        with pytest.raises(CheckpointError, match="does not report its size"):
            use("liar://runs/a.ckpt")
    with pytest.raises(CheckpointError) as caught:
        save("liar://runs/a.ckpt", 4)
    assert "report this as a bug" not in str(caught.value)
    collect_garbage("liar://runs")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with remote_jobs.s3_server() as environment:
        yield environment


def save(url: str, value: int) -> None:
    tensors = {"w": shard_of(torch.full((1000,), value))}
    nnx_checkpoint.save(url, tensors=tensors, objects={"value": value})


def check(url: str, value: int) -> None:
    assert nnx_checkpoint.verify(url) == []
    assert nnx_checkpoint.open_checkpoint(url).read("w").tolist() == [value] * 1000


def put(key: str, body: bytes) -> None:
    """Store an object under a key as it is, which fsspec would take for a path."""
    fsspec.filesystem("s3").call_s3("put_object", Bucket="bucket", Key=key, Body=body)


def stored() -> set[str]:
    listed = fsspec.filesystem("s3").call_s3("list_objects_v2", Bucket="bucket")
    return {entry["Key"] for entry in listed.get("Contents", ())}


@pytest.mark.full
def test_odd_names_in_a_bucket_lead_nowhere_and_are_left_alone(s3: dict[str, str]) -> None:
    url = "s3://bucket/odd/a.ckpt"
    save(url, 1)
    odd = {f"odd/a.ckpt/{name}" for name in ODD_NAMES} | {"odd/outside", "b"}
    for key in odd:
        put(key, b"mine")
    save(url, 2)
    check(url, 2)
    collect_garbage(url, keep_previous=0)
    check(url, 2)
    kept = odd - {"odd/a.ckpt/20200101T000000.000000-deadbeef/../b"}  # it lies in a save's directory
    assert kept <= stored()


def test_a_bucket_that_begins_with_odd_names_is_refused(s3: dict[str, str]) -> None:
    put("strange/a.ckpt/x\x1b]0;owned\x07", b"mine")
    with pytest.raises(CheckpointError, match="it holds other files") as caught:
        save("s3://bucket/strange/a.ckpt", 1)
    assert str(caught.value).isprintable()
    assert "strange/a.ckpt/x\x1b]0;owned\x07" in stored()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("how", ["replaced", "emptied", "removed", "saved over"])
def test_what_is_overwritten_between_two_reads_is_noticed(s3: dict[str, str], how: str) -> None:
    url = f"s3://bucket/{how.replace(' ', '-')}/a.ckpt"
    save(url, 1)
    opened = nnx_checkpoint.open_checkpoint(url)
    (file,) = [key for key in remote_jobs.keys(url) if key.endswith(".safetensors")]
    filesystem = fsspec.filesystem("s3")
    before = filesystem.cat_file(f"{url}/{file}")
    if how == "replaced":
        filesystem.pipe_file(f"{url}/{file}", before[:-8] + bytes(8))
    elif how == "emptied":
        filesystem.pipe_file(f"{url}/{file}", b"")
    elif how == "removed":
        filesystem.rm(f"{url}/{file}")
    else:
        save(url, 2)
        save(url, 3)
    remote._chunks._kept.clear()
    with pytest.raises(CheckpointError):
        opened.read("w")
    if how == "saved over":
        check(url, 3)


@pytest.mark.full
def test_parts_that_a_killed_upload_left_are_no_part_of_the_checkpoint(s3: dict[str, str]) -> None:
    url = "s3://bucket/parts/a.ckpt"
    save(url, 1)
    killed = begin(place_of(url))
    key = str(killed.directory / "r00000.safetensors").removeprefix("s3://bucket/")
    filesystem = fsspec.filesystem("s3")
    upload = filesystem.call_s3("create_multipart_upload", Bucket="bucket", Key=key)["UploadId"]
    part = {"Bucket": "bucket", "Key": key, "UploadId": upload, "PartNumber": 1}
    filesystem.call_s3("upload_part", Body=bytes(5 << 20), **part)
    check(url, 1)
    save(url, 2)
    check(url, 2)
    filesystem.call_s3("abort_multipart_upload", Bucket="bucket", Key=key, UploadId=upload)


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with one status."""

    status, code = 503, "SlowDown"

    def _refuse(self) -> None:
        body = f"<Error><Code>{self.code}</Code><Message>{self.code}</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _refuse

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.full
@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (503, "SlowDown"), (500, "InternalError")]
)
def test_a_bucket_that_only_refuses_is_a_clear_error(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    url = f"s3://bucket/refused-{status}/a.ckpt"
    save(url, 1)
    kept = stored()
    monkeypatch.setattr(Refusing, "status", status)
    monkeypatch.setattr(Refusing, "code", code)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("s3fs.core._error_retries", 1, raising=False)
            patch.setitem(os.environ, "AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            patch.setitem(os.environ, "AWS_MAX_ATTEMPTS", "1")
            remote_jobs.forget_connections()
            for attempt in (lambda: save(url, 2), lambda: nnx_checkpoint.open_checkpoint(url)):
                with pytest.raises(CheckpointError, match=url) as caught:
                    attempt()
                assert caught.value.remedy
    finally:
        server.shutdown()
        server.server_close()
        remote_jobs.forget_connections()
    assert kept <= stored()
    check(url, 1)
