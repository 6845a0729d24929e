"""What was found by trying, kept between processes: one small JSON file for each operator and call.

A file that cannot be read is ignored and written anew, a directory that cannot be written is done without.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from nnx_nnscaler.placement import Placement
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["cache_dir", "load", "store"]

_FORMAT = 1


def cache_dir() -> Path:
    """Where it is kept: below ``NNX_CACHE_DIR``, or below the user's cache directory."""
    base = os.environ.get("NNX_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nnx"
    return root / "nnscaler" / "tried" / torch.__version__


def load(key: Mapping[str, Any]) -> list[Strategy] | None:
    """What was found for this call; None if nothing was kept, or nothing that can be read."""
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        if kept["format"] != _FORMAT or kept["call"] != json.loads(json.dumps(key)):
            return None
        return [
            Strategy(entry["name"], _placements(entry["inputs"]), _placements(entry["outputs"]))
            for entry in kept["strategies"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: Mapping[str, Any], strategies: list[Strategy]) -> None:
    """Keep what was found for this call."""
    path = _path(key)
    kept = {
        "format": _FORMAT,
        "call": key,
        "strategies": [
            {"name": s.name, "inputs": [str(p) for p in s.inputs], "outputs": [str(p) for p in s.outputs]}
            for s in strategies
        ],
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may write the same file: each writes its own and renames it.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(kept, file, indent=1)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def _placements(texts: list[str]) -> tuple[Placement, ...]:
    return tuple(Placement.parse(text) for text in texts)


def _path(key: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    return cache_dir() / f"{key['operator']}-{digest[:16]}.json"
