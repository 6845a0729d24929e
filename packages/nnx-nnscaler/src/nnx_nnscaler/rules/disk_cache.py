"""What was found by trying, kept between processes: one small JSON file for each operator and call.

A file that cannot be read is ignored and written anew, a directory that cannot be written is done without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from nnx_core.cache import cache_directory, read_json, write_json
from nnx_nnscaler.placement import Placement
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["cache_dir", "load", "store"]

_FORMAT = 1


def cache_dir() -> Path:
    """Where it is kept; what one torch can do, another may not."""
    return cache_directory("nnscaler", "tried", torch.__version__)


def load(key: Mapping[str, Any]) -> list[Strategy] | None:
    """What was found for this call; None if nothing was kept, or nothing that can be read."""
    kept = read_json(_path(key))
    try:
        if kept["format"] != _FORMAT or kept["call"] != json.loads(json.dumps(key)):
            return None
        return [
            Strategy(entry["name"], _placements(entry["inputs"]), _placements(entry["outputs"]))
            for entry in kept["strategies"]
        ]
    except (ValueError, KeyError, TypeError):
        return None


def store(key: Mapping[str, Any], strategies: list[Strategy]) -> None:
    """Keep what was found for this call."""
    kept = {
        "format": _FORMAT,
        "call": key,
        "strategies": [
            {"name": s.name, "inputs": [str(p) for p in s.inputs], "outputs": [str(p) for p in s.outputs]}
            for s in strategies
        ],
    }
    write_json(_path(key), kept)


def _placements(texts: list[str]) -> tuple[Placement, ...]:
    return tuple(Placement.parse(text) for text in texts)


def _path(key: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    return cache_dir() / f"{key['operator']}-{digest[:16]}.json"
