"""Object stores for tests: a real S3 server on loopback, and a store that fails after some operations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from nnx_core.errors import CheckpointError


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run a server with a bucket named ``bucket``; gives the environment with which it is reached."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(environment)
    try:
        # What an earlier server of this process stored outlives it.
        urlopen(Request(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()
        fsspec.filesystem("s3").mkdir("bucket")
        yield environment
    finally:
        server.stop()
        for name in environment:
            os.environ.pop(name)
        forget_connections()


def forget_connections() -> None:
    """Let the next URL be opened with the environment as it is then."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def keys(url: str) -> set[str]:
    """Every object below a URL, relative to it."""
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return {key.removeprefix(root).strip("/") for key in filesystem.find(root)}


def refusal(path: str) -> tuple[str, str]:
    """The class and text of the error with which saving to a URL fails on this rank."""
    import torch

    import nnx_checkpoint
    from nnx_base.shard import shard_of

    forget_connections()
    try:
        nnx_checkpoint.save(path, tensors={"w": shard_of(torch.ones(3))}, objects={})
    except CheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        forget_connections()
    return "", ""


class Unreachable(MemoryFileSystem):
    """A store that can be reached for some operations only, as by a process that is then killed."""

    protocol = "unreachable"
    left: int | None = None
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).replace("unreachable://", "memory://"))

    def _count(self) -> None:
        if Unreachable.left is not None:
            Unreachable.left -= 1
            if Unreachable.left < 0:
                raise ConnectionError("planted: could not connect")

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().pipe_file(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().cat_file(*args, **kwargs)

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super()._open(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().ls(*args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().info(*args, **kwargs)

    def rm(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        left, Unreachable.left = Unreachable.left, None
        try:
            return super().rm(*args, **kwargs)
        finally:
            Unreachable.left = left


fsspec.register_implementation("unreachable", Unreachable, clobber=True)
