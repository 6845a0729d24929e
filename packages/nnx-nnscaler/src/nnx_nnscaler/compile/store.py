"""Store compiled programs on disk, and refuse those that changed.

    <savedir>/<class>/<instance or _>/<key>/{forward.py, plan.json, graph.json, meta.json}

The key is a digest of everything that a program depends on. So another model, shape, policy or version has
its own folder, and no program is stale. ``meta.json`` lists these facts, and a checksum of every other file.
Weights are never stored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_core.errors import PlanError

_FORMAT = 1


_FILES = {"source": "forward.py", "plan": "plan.json", "graph": "graph.json"}


@dataclass(frozen=True, slots=True)
class Entry:
    """The texts of one program.

    Attributes:
        source: The Python source.
        plan: The plan as JSON.
        graph: The graph as JSON.
    """

    source: str
    plan: str
    graph: str


def key_of(made_from: Mapping[str, Any]) -> str:
    """Return the name of the folder for programs that depend on these facts.

    Example:
        >>> key_of({"policy": "tp"}) == key_of({"policy": "tp"}) != key_of({"policy": "dp"})
        True
    """
    text = json.dumps(made_from, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Store:
    """The programs of one instance of a class.

    Args:
        savedir: The folder of all programs.
        owner: The qualified name of the module's class.
        instance: A name that tells instances of one class apart.
    """

    def __init__(self, savedir: str | Path, *, owner: str, instance: str | None = None) -> None:
        folder = Path(savedir).expanduser().absolute()
        self.folder = folder / _as_name(owner) / _as_name(instance or "_")

    def path(self, key: str) -> Path:
        """Return the path of a program's source."""
        return self.folder / key / _FILES["source"]

    def read(self, key: str) -> Entry | None:
        """Return the program of a key; None if there is none.

        Raises:
            PlanError: The files there are broken, edited or copied from elsewhere.
        """
        folder = self.folder / key
        while folder.exists():
            seen = _stamp(folder)
            try:
                return self._read(folder, key)
            except PlanError:
                # Otherwise another process has just replaced the folder: read again.
                if folder.exists() and _stamp(folder) == seen:
                    raise
        return None

    def _read(self, folder: Path, key: str) -> Entry:
        meta = _read_meta(folder)
        if key_of(meta["made_from"]) != key:
            raise _refused(folder / "meta.json", "it describes a program of another key")
        return Entry(**{name: _read_checked(folder, file, meta) for name, file in _FILES.items()})

    def find_graph(self, traced_from: Mapping[str, Any]) -> str | None:
        """Return a graph with exactly this origin, from a program of any policy; None if there is none.

        Raises:
            PlanError: The file exists and is broken.
        """
        for path in sorted(self.folder.glob("*/meta.json")):
            if path.parent.name.startswith("."):  # another process still writes it
                continue
            meta = _read_meta(path.parent)
            if all(meta["made_from"].get(name) == value for name, value in traced_from.items()):
                return _read_checked(path.parent, _FILES["graph"], meta)
        return None

    def write(self, key: str, entry: Entry, made_from: Mapping[str, Any]) -> Path:
        """Store a program, replace one of the same key, and return the path of its source.

        Several processes may write at once. A folder appears only when it is complete.
        """
        texts = {file: getattr(entry, name) for name, file in _FILES.items()}
        sums = {file: _sum(text) for file, text in texts.items()}
        texts["meta.json"] = json.dumps(
            {"format": _FORMAT, "made_from": made_from, "sha256": sums}, indent=2, sort_keys=True
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            made.chmod(0o777 & ~_umask())
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            self._move_into_place(made, self.folder / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return self.path(key)

    def _move_into_place(self, made: Path, place: Path) -> None:
        while True:
            try:
                made.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=self.folder))
            try:
                place.rename(old / "entry")
            except FileNotFoundError:  # another process has just removed it
                pass
            finally:
                shutil.rmtree(old, ignore_errors=True)


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes when another folder replaces a folder."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"it cannot be read ({type(error).__name__}: {error})") from None
    if version != _FORMAT:
        raise _refused(path, f"its format is {version!r} instead of {_FORMAT}")
    if not isinstance(meta.get("made_from"), dict) or not isinstance(meta.get("sha256"), dict):
        raise _refused(path, "it lacks 'made_from' or 'sha256'")
    return meta


def _read_checked(folder: Path, file: str, meta: Mapping[str, Any]) -> str:
    path = folder / file
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(path, f"it cannot be read ({type(error).__name__}: {error})") from None
    if meta["sha256"].get(file) != _sum(text):
        raise _refused(path, "it was changed after it was written")
    return text


def _refused(path: Path, reason: str) -> PlanError:
    return PlanError(
        f"cannot reuse {path}: {reason}.",
        remedy=f"Delete the folder {path.parent}, or set reuse='override' or 'moo' to compile again.",
    )


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_name(text: str) -> str:
    """Return a file name with the readable characters of a text, distinct for other texts."""
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).lstrip(".")
    return name if name == text else f"{name}-{_sum(text)[:8]}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
