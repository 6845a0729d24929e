"""Files of checkpoints as trees, and back, so that a changed tree is a valid file again."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import xxhash

from fuzz.pickles import Made, Tup, dump_pickle, load_pickle

__all__ = ["Document", "Packed", "parse", "sign"]

HEAD = b'{\n "digest": "'
ZEROS = b"0" * 32


class Packed(list[Any]):
    """A text or record with a tree of its own in it, and how to write that."""

    write: Callable[[Any], Any]

    @classmethod
    def of(cls, tree: Any, write: Callable[[Any], Any]) -> Packed:
        made = cls([tree])
        made.write = write
        return made


class Document:
    """A file as a tree.

    Args:
        tree: The content of the file.
        write: Makes bytes of a tree.
    """

    def __init__(self, tree: Any, write: Callable[[Any], bytes]) -> None:
        self.tree = tree
        self._write = write

    def dump(self) -> bytes:
        """The file's bytes."""
        return self._write(self.tree)


def parse(name: str, raw: bytes) -> Document | None:
    """Take a file apart; None if it is bytes and no more."""
    if name.endswith(".json"):
        indent = 1 if raw.startswith(b"{\n ") else None
        return Document(json.loads(raw), lambda tree: (json.dumps(tree, indent=indent) + "\n").encode())
    if name.endswith(".safetensors"):
        return _safetensors(raw)
    if not name.endswith(".distcp") and raw.startswith(b"PK") and zipfile.is_zipfile(io.BytesIO(raw)):
        return _torch_file(raw)
    if name.endswith(".metadata"):
        return Document(load_pickle(raw), dump_pickle)
    return None


# --- the formats ----------------------------------------------------------------------------------


def _unpack(value: Any) -> Any:
    """Texts that are JSON themselves, as trees."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return Packed.of(json.loads(value), json.dumps)
        except ValueError:
            return value
    if isinstance(value, dict):
        for key in value:
            value[key] = _unpack(value[key])
    elif isinstance(value, list) and not isinstance(value, Packed):
        value[:] = [_unpack(item) for item in value]
    return value


def _pack(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy with the texts restored; shared objects stay shared."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    made = value
    if isinstance(value, Packed):
        made = value.write(_pack(value[0], memo))
    elif isinstance(value, dict):
        made = memo[id(value)] = {}
        made.update((key, _pack(item, memo)) for key, item in value.items())
    elif type(value) in (list, Tup):
        made = memo[id(value)] = type(value)()
        made.extend(_pack(item, memo) for item in value)
    elif isinstance(value, Made):
        made = memo[id(value)] = type(value)()
        made.args, made.state = _pack(value.args, memo), _pack(value.state, memo)
        made.items, made.values = _pack(value.items, memo), _pack(value.values, memo)
    memo[id(value)] = made
    return made


def _safetensors(raw: bytes) -> Document:
    (length,) = struct.unpack("<Q", raw[:8])
    header = _unpack(json.loads(raw[8 : 8 + length]))

    def write(tree: Any) -> bytes:
        text = (
            tree["header"]
            if isinstance(tree["header"], bytes)
            else json.dumps(_pack(tree["header"])).encode()
        )
        text += b" " * ((length if len(text) <= length else -(-len(text) // 8) * 8) - len(text))
        return struct.pack("<Q", len(text) + tree["more"]) + text + tree["data"]

    return Document({"header": header, "more": 0, "data": raw[8 + length :]}, write)


def _torch_file(raw: bytes) -> Document:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        records = [[name, archive.read(name)] for name in archive.namelist()]
    for record in records:
        if record[0].endswith("data.pkl"):
            record[1] = Packed.of(_unpack(load_pickle(record[1])), dump_pickle)

    def write(tree: Any) -> bytes:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in tree:
                archive.writestr(
                    name, content.write(_pack(content[0])) if isinstance(content, Packed) else content
                )
        return target.getvalue()

    return Document(records, write)


# --- our own format -------------------------------------------------------------------------------


def sign(
    files: dict[str, bytes], before: dict[str, bytes], sums: Callable[[Any, Any, dict[str, bytes]], Any]
) -> None:
    """Give a checkpoint of our own the checksums that its files have, as its owner could.

    An entry of the manifest that was changed itself is left as it is.

    Args:
        files: The files by name; changed in place.
        before: The files before the change.
        sums: Gives the checksums of every rank file for a manifest and an index.
    """
    try:
        manifest = json.loads(files["manifest.json"])
        was = json.loads(before["manifest.json"])
        directory, listed = was["save_id"], manifest["files"]
        for name in [name for name in listed if listed[name] == was["files"].get(name)]:
            data = files.get(f"{directory}/{name}")
            if data is not None and data != before[f"{directory}/{name}"]:
                listed[name] = _entry(name, data)
        if any(
            files.get(name) != before[name]
            for name in before
            if name.endswith((".safetensors", "index.json"))
        ):
            for name, data in _sums(sums, manifest, files, directory).items():
                files[f"{directory}/{name}"] = data
                listed[name] = _entry(name, data)
        if manifest != json.loads(files["manifest.json"]):
            files["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        pass  # then it is signed as it is
    raw = files.get("manifest.json", b"")
    if raw.startswith(HEAD) and len(raw) > len(HEAD) + len(ZEROS):
        unsigned = HEAD + ZEROS + raw[len(HEAD) + len(ZEROS) :]
        signed = HEAD + xxhash.xxh3_128_hexdigest(unsigned).encode() + unsigned[len(HEAD) + len(ZEROS) :]
        copy = next(name for name in before if name.endswith("/manifest.json"))
        if files.get(copy) == before[copy]:
            files[copy] = signed
        files["manifest.json"] = signed


def _entry(name: str, data: bytes) -> dict[str, Any]:
    digested = len(data)
    if name.endswith(".safetensors"):
        digested = min(len(data), 8 + struct.unpack("<Q", data[:8])[0])
    return {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data[:digested]), "digested": digested}


def _sums(sums: Any, manifest: Any, files: dict[str, bytes], directory: str) -> dict[str, bytes]:
    try:
        found: dict[str, bytes] = sums(manifest, json.loads(files[f"{directory}/index.json"]), files)
    except Exception:  # nothing says where the entries would be
        return {}
    return found
