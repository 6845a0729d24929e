"""Implement `nnx_checkpoint.storage` for URLs such as ``s3://`` and ``gs://``, through fsspec.

Object stores have no directories, no rename and no locks. A file is one upload, which appears when it is
complete; replacing a file is one upload too. The store's package finds credentials and endpoints in the
environment, its configuration files and ``FSSPEC_*`` variables.
This module adds bounded memory, few requests for small reads, and clear errors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Literal, cast

import fsspec  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.files import truncated
from nnx_checkpoint.storage.lock import Lock
from nnx_checkpoint.storage.streams import StreamWriter

_PART = 16 << 20
"""Bytes of one part of an upload."""
_MOST_PARTS = 9_000
"""S3 allows ten thousand parts."""
_CHUNK = 1 << 20
"""Length of the chunks that smaller reads fetch and cache."""
_KEPT_CHUNKS = 64

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_CREDENTIALS = (
    "Check the credentials and their permission to read, list, write and delete; the store's own package "
    "reads them, for example from AWS_ACCESS_KEY_ID or ~/.aws/credentials."
)
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("bucket does not exist", "Create the bucket, or check its name."),
    ("credential", _CREDENTIALS),
    ("permission", _CREDENTIALS),
    ("forbidden", _CREDENTIALS),
    ("denied", _CREDENTIALS),
    ("connect", "Check the network and the endpoint, such as AWS_ENDPOINT_URL or FSSPEC_S3_ENDPOINT_URL."),
    ("timeout", "Check the network and the endpoint, such as AWS_ENDPOINT_URL or FSSPEC_S3_ENDPOINT_URL."),
)


@contextlib.contextmanager
def _explained(doing: str, url: str) -> Iterator[None]:
    """Context manager that converts any error of a store's package into one with a remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # each store has exceptions of its own
        reason = str(error).strip().rstrip(".") or type(error).__name__
        if isinstance(error, FileNotFoundError) and "bucket" not in reason:
            reason = "the file does not exist"
        searched = f"{type(error).__name__} {reason}".lower()
        remedy = next((remedy for word, remedy in _REMEDIES if word in searched), "Check the URL.")
        raise CheckpointError(f"cannot {doing} '{url}': {reason}.", remedy=remedy) from error


class UrlPlace(Place):
    """A URL."""

    def __init__(self, filesystem: Any, key: str, url: str) -> None:
        self._fs = filesystem
        self._key = key
        self._url = url

    @classmethod
    def of(cls, url: str) -> UrlPlace:
        """Return the place at a URL.

        Raises:
            CheckpointError: The protocol of the URL is unknown, or its package is not installed.
        """
        url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            with _explained("open", url):
                filesystem, key = url_to_fs(url)
        except CheckpointError as error:
            if isinstance(error.__cause__, (ImportError, ValueError)):
                raise _unavailable(url, protocol) from error
            raise
        return cls(filesystem, key, url)

    @property
    @override
    def location(self) -> str:
        return self._url

    @property
    @override
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @override
    def __truediv__(self, name: str) -> UrlPlace:
        return UrlPlace(self._fs, f"{self._key}/{name}", f"{self._url}/{name}")

    @override
    def kind(self) -> Literal["file", "directory"] | None:
        self._fs.invalidate_cache()
        with self.explained("read"):
            try:
                return cast("Literal['file', 'directory']", self._fs.info(self._key)["type"])
            except FileNotFoundError:
                return None

    @override
    def names(self) -> list[str]:
        return sorted(self._listed())

    @override
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        listed = self._listed()
        for name in names:
            if name in listed:  # a listing of https:// has no sizes
                size = listed[name]
                found[name] = (self / name).size() if size is None else size
        return found

    @override
    def _size(self) -> int:
        self._fs.invalidate_cache()
        size = _length(self._fs.info(self._key))
        if size is None:
            raise CheckpointError(
                f"cannot read '{self._url}': its store does not report its size.",
                remedy="Copy the checkpoint to a disk or another store first.",
            )
        return size

    @override
    def reader(self) -> UrlReader:
        return UrlReader(self._fs, self._key, self._url)

    @override
    def read(self, size: int, *, start: int = 0) -> bytes:
        with self.explained("read"):
            data: bytes = self._fs.cat_file(self._key, start=start, end=start + size) if size else b""
        if len(data) != size:
            raise truncated(self._url, start + len(data), start + size)
        return data

    @override
    def open(self) -> BinaryIO:
        with self.explained("read"):
            return cast(BinaryIO, self._fs.open(self._key, "rb"))

    @override
    def make(self) -> None:
        """Do nothing: object stores have no directories."""

    @override
    def write(self, data: bytes) -> None:
        with self.explained("write"):
            self._fs.pipe_file(self._key, data)

    @override
    def stream(self, size: int) -> StreamWriter:
        return StreamWriter(_Upload(self._fs, self._key, self._url, size), size=size)

    @override
    def replace(self, data: bytes, *, temporary: str) -> None:
        self.write(data)

    @override
    def sync(self) -> None:
        """Do nothing: a complete upload is durable."""

    @override
    def remove(self) -> None:
        self._fs.invalidate_cache()
        with self.explained("remove"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._key, recursive=True)

    @override
    def remove_if_empty(self) -> None:
        """Do nothing: object stores have no empty directories."""

    @override
    def lock(self) -> Lock | None:
        return None

    @override
    def explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return _explained(doing, self._url)

    def _listed(self) -> dict[str, int | None]:
        self._fs.invalidate_cache()
        with self.explained("list"):
            try:
                entries = self._fs.ls(self._key, detail=True)
            except FileNotFoundError:
                entries = []
            key = self._key.strip("/")
            return {
                name.rpartition("/")[2]: _length(entry)
                for entry in entries
                if (name := entry["name"].strip("/")) != key  # a file, or a marker of the directory itself
            }


def _length(entry: Any) -> int | None:
    """Return the size of a file from its store; None if it is missing or invalid."""
    size = entry.get("size")
    return size if type(size) is int and size >= 0 else None


class UrlReader:
    """An open file behind a URL; every large read is one request."""

    gap = 1 << 20
    parallel = 8

    def __init__(self, filesystem: Any, key: str, url: str) -> None:
        self._fs = filesystem
        self._key = key
        self._url = url

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill memory with the bytes from a position on; all of them must be there."""
        if len(target) >= _CHUNK:
            self._put(target, self._request(position, position + len(target)), position)
            return
        done = 0
        while done < len(target):
            number, inside = divmod(position + done, _CHUNK)
            part = _chunks.get(self, number)[inside : inside + len(target) - done]
            if not part:
                raise truncated(self._url, position + done, position + len(target))
            target[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        """Drop the cached ranges of the file."""
        _chunks.forget(self)

    def chunk(self, number: int) -> bytes:
        """Return one chunk; the last one of the file is shorter."""
        return self._request(number * _CHUNK, (number + 1) * _CHUNK)

    def _request(self, start: int, stop: int) -> bytes:
        with _explained("read", self._url):
            return cast(bytes, self._fs.cat_file(self._key, start=start, end=stop))

    def _put(self, target: memoryview, data: bytes, position: int) -> None:
        if len(data) != len(target):
            raise truncated(self._url, position + len(data), position + len(target))
        target[:] = data


class _Chunks:
    """A cache of the last chunks of all readers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[UrlReader, int], tuple[threading.Lock, list[bytes]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, reader: UrlReader, number: int) -> bytes:
        """Return a chunk, requested once even for several threads."""
        with self._lock:
            lock, chunk = self._kept.setdefault((reader, number), (threading.Lock(), []))
            self._kept.move_to_end((reader, number))
            while len(self._kept) > _KEPT_CHUNKS:
                self._kept.popitem(last=False)
        with lock:
            if not chunk:
                chunk.append(reader.chunk(number))
            return chunk[0]

    def forget(self, reader: UrlReader) -> None:
        with self._lock:
            for key in [key for key in self._kept if key[0] is reader]:
                del self._kept[key]


_chunks = _Chunks()


class _Upload:
    """A multipart upload of a new file, which appears when it is complete."""

    def __init__(self, filesystem: Any, key: str, url: str, size: int) -> None:
        self._url = url
        part = max(_PART, -(-size // _MOST_PARTS))
        with _explained("write", url):
            self._file = filesystem.open(key, "wb", block_size=part)
        self._complete = False

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Add bytes; send a part when enough are collected."""
        with _explained("write", self._url):
            self._file.write(buffer[:length])

    def finish(self, size: int) -> None:
        """Send the remaining bytes and complete the upload."""
        with _explained("write", self._url):
            self._file.close()
        self._complete = True

    def close(self) -> None:
        """Abandon the upload unless it is complete."""
        if self._complete:
            return
        with contextlib.suppress(Exception):  # another error is being raised, and the name is never reused
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # else its destructor would complete the upload


def _unavailable(url: str, protocol: str) -> CheckpointError:
    package = _PACKAGES.get(protocol)
    if package and importlib.util.find_spec(package) is None:
        return CheckpointError(
            f"cannot open '{url}': the package {package} is not installed.",
            remedy=f"Install it with `pip install {package}`.",
        )
    if protocol in known_implementations:
        hint = known_implementations[protocol].get("err", "")
        return CheckpointError(f"cannot open '{url}': {hint or 'a package is missing'}.")
    return CheckpointError(
        f"cannot open '{url}': fsspec {fsspec.__version__} knows no protocol {protocol!r}.",
        remedy="Use a path, or a URL such as s3://bucket/name or gs://bucket/name.",
    )
