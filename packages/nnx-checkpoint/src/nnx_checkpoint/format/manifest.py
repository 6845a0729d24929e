"""Define the manifest: the one file whose replacement commits a save.

It names the save directory, every file in it with size and digest, the writer and the date. Its digest covers
the manifest itself: a reader checks that before it parses anything.
This module owns its text form and never touches the file system; it imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from nnx_base.errors import CheckpointError

__all__ = [
    "BLOCK",
    "MANIFEST",
    "DamagedManifestError",
    "FileEntry",
    "Manifest",
    "begins_as_ours",
    "decode_manifest",
    "digest",
    "encode_manifest",
    "is_save_id",
    "load_json",
    "objects_file",
    "rank_file",
]

MANIFEST = "manifest.json"
OBJECTS = "objects.json"
FORMAT = "nnx-ckpt"
VERSION = (1, 2)
"""The version that this nnx writes, and the oldest that it reads. No release wrote 1.0 and 1.1."""
BLOCK = 256 * 1024
"""Bytes of tensor data under one checksum, in checkpoints that this version writes."""

_HASH = "xxh3"
_MAX_BLOCK = 1 << 30
_MOST_RANKS = 10_000_000
_SAVE_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
# The digest is at a fixed position, so that it can be checked before anything is parsed.
_HEAD = b'{\n "digest": "'
_ZEROS = b"0" * 32
_SIGNED_HEAD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{32}")
_NAMED = f'"format": "{FORMAT}"'.encode()


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"r{rank:05d}.safetensors"


def objects_file(rank: int | None) -> str:
    """Return the name of the file with the objects of one rank, or with the common ones."""
    return OBJECTS if rank is None else f"r{rank:05d}.{OBJECTS}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size and digest of one file of a save.

    Attributes:
        size: Length of the file in bytes.
        digest: xxh3-128 of the first `digested` bytes, in hexadecimal.
        digested: The length of the file, or of its header if its data has checksums of its own.
    """

    size: int
    digest: str
    digested: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        save_id: Name of the directory that holds this save.
        created: The time of the commit, ISO 8601 in UTC.
        files: Every file in that directory except the copy of the manifest.
        writer: World size and versions of the libraries that wrote it.
        provenance: The caller's record: strategy, step, epoch and so on. nnx never depends on it.
        block: Bytes of tensor data under one checksum.
        version: Format version; a reader refuses another major version.
        requires: Features that a reader must know to read this checkpoint correctly.
    """

    save_id: str
    created: str
    files: Mapping[str, FileEntry]
    writer: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    block: int = BLOCK
    version: tuple[int, int] = VERSION
    requires: tuple[str, ...] = ()


class DamagedManifestError(CheckpointError):
    """A manifest exists, but it is damaged."""


def load_json(raw: bytes) -> Any:
    """Parse strict JSON: UTF-8 without a byte order mark, no key twice, only finite numbers.

    Raises:
        ValueError: The bytes are not strict JSON.
    """

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    def finite(text: str) -> float:
        number = float(text)
        if math.isinf(number):  # 1e400, for example
            raise ValueError(f"{text[:20]} is beyond the numbers of 64 bits")
        return number

    return json.loads(
        raw.decode("utf-8"), object_pairs_hook=unique_names, parse_constant=constant, parse_float=finite
    )


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, and refuse one with duplicate names."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 in hexadecimal, the digest of all bytes that are not tensor data."""
    return xxhash.xxh3_128_hexdigest(data)


def is_save_id(name: str) -> bool:
    """Return True if this is the name of a save's directory, which may be collected."""
    return _SAVE_ID.fullmatch(name) is not None


def begins_as_ours(head: bytes) -> bool:
    """Return True if a file starts like a manifest of nnx, even with some bytes damaged."""
    return _SIGNED_HEAD.match(head) is not None or _NAMED in head


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``.

    Raises:
        CheckpointError: The provenance is not plain JSON.
    """
    body = {
        "format": FORMAT,
        "version": list(manifest.version),
        "requires": list(manifest.requires),
        "save_id": manifest.save_id,
        "created": manifest.created,
        "writer": dict(manifest.writer),
        "provenance": dict(manifest.provenance),
        "hash": {"algorithm": _HASH, "block": manifest.block},
    }
    # One line for each file: `json` with indentation takes a second for the files of 16,384 ranks.
    files = ",\n".join(
        f"  {json.dumps(name)}: "
        f'{{"size": {entry.size}, "digest": "{entry.digest}", "digested": {entry.digested}}}'
        for name, entry in sorted(manifest.files.items())
    )
    try:
        text = json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the provenance of a checkpoint is not plain JSON: {error}.",
            remedy="Pass strings, finite numbers, booleans, lists and dicts only.",
        ) from error
    text = f'{text[1:-2]},\n "files": {{\n{files}\n }}\n}}\n'
    unsigned = _HEAD + _ZEROS + b'",' + text.encode()
    return _sign(unsigned)


def _sign(unsigned: bytes) -> bytes:
    start = len(_HEAD)
    return unsigned[:start] + digest(unsigned).encode() + unsigned[start + len(_ZEROS) :]


def decode_manifest(raw: bytes, *, source: str) -> Manifest:
    """Check and parse ``manifest.json``.

    Args:
        raw: The bytes of the manifest.
        source: The path of the manifest, for messages.

    Raises:
        CheckpointError: The manifest is damaged, not of nnx, or of a version that this nnx cannot read.
    """
    body = _parse(raw, source)
    if body.get("format") != FORMAT and not raw.startswith(_HEAD):
        raise CheckpointError(
            f"'{source}' is not the manifest of an nnx checkpoint (format {body.get('format')!r}).",
            remedy="Check the path.",
        )
    if _sign(_HEAD + _ZEROS + raw[len(_HEAD) + len(_ZEROS) :]) != raw:
        raise _damaged(source, "its digest does not match its contents")
    _refuse_others(body, source)
    try:
        return _build(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(source, f"malformed entry ({error!r})") from error


def _parse(raw: bytes, source: str) -> dict[str, Any]:
    try:
        body = load_json(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(source, f"it is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise _damaged(source, "it is not a JSON object")
    return body


def _refuse_others(body: dict[str, Any], source: str) -> None:
    """Refuse versions and features that this nnx does not know."""
    version, requires = body.get("version"), body.get("requires")
    shown = ".".join(map(str, version)) if isinstance(version, list) else version
    if version in ([1, 0], [1, 1]):
        raise CheckpointError(
            f"'{source}' has format version {shown}, which no release of nnx has written; "
            f"this nnx reads version 1.2 and later ones of 1.x.",
            remedy="Read it with the sources that wrote it, and save it again with these.",
        )
    if not isinstance(version, list) or len(version) != 2 or version[0] != VERSION[0]:
        raise CheckpointError(
            f"'{source}' has format version {shown}; this nnx reads version {VERSION[0]}.x.",
            remedy="Upgrade with `pip install --upgrade nnx-core`.",
        )
    if requires:
        raise CheckpointError(
            f"'{source}' needs features that this nnx does not know: {requires}.",
            remedy="Upgrade with `pip install --upgrade nnx-core`.",
        )


def _build(body: dict[str, Any]) -> Manifest:
    save_id, algorithm, block = body["save_id"], body["hash"]["algorithm"], body["hash"]["block"]
    if not is_save_id(save_id):
        raise ValueError(f"save_id {save_id!r}")
    if algorithm != _HASH or type(block) is not int or not 0 < block <= _MAX_BLOCK:
        raise ValueError(f"hash {body['hash']!r}")
    ranks = body["writer"].get("world_size", 1)
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"world_size {ranks!r}")
    files = {name: _file_entry(name, entry) for name, entry in body["files"].items()}
    return Manifest(
        save_id=save_id,
        created=str(body["created"]),
        files=files,
        writer=dict(body["writer"]),
        provenance=dict(body["provenance"]),
        block=block,
        version=(body["version"][0], body["version"][1]),
        requires=tuple(body["requires"]),
    )


def _file_entry(name: str, entry: dict[str, Any]) -> FileEntry:
    size, digested, hexadecimal = entry["size"], entry["digested"], entry["digest"]
    if type(size) is not int or type(digested) is not int or not 0 <= digested <= size:
        raise ValueError(f"size of {name!r}")
    if not _FILE_NAME.fullmatch(name) or not _DIGEST.fullmatch(hexadecimal):
        raise ValueError(f"entry of {name!r}")
    return FileEntry(size, hexadecimal, digested)


def _damaged(source: str, why: str) -> DamagedManifestError:
    return DamagedManifestError(
        f"'{source}' is damaged: {why}.",
        remedy="Restore it from a backup, or resume from another checkpoint.",
    )
