"""Read Megatron-LM's ``torch_dist`` directories: DCP files, ``common.pt`` and ``metadata.json``.

Weights have Megatron's own names and shapes: layers of one kind are one tensor with a first dim of layers.
Its optimizer has no param groups of torch, so its tensors are kept among the trainer's objects.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import TENSORS, Contents, ForeignCheckpoint
from nnx_checkpoint.foreign.dcp_directory import read_directory
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.formats import CheckpointFormat
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.unpickling.allowed import Inert
from nnx_checkpoint.unpickling.torch_file import load_torch_file

_CONFIG = "metadata.json"
_COMMON = "common.pt"
_BACKEND = "torch_dist"
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")
_TRAINING = re.compile(r"(chained_\d+\.)?optimizer\.|(rng_state|rerun_state_machine_state)\b")
_INERT = ("megatron.", "transformer_engine.", "enum.")


class MegatronDirectory(CheckpointFormat):
    """The directory of one iteration, such as ``iter_0001000``."""

    name = "megatron"

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        file = Path(path) / _CONFIG
        return file.is_file() and b'"sharded_backend"' in file.read_bytes()[:4096]

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        _require_dcp(place)
        metadata, tree = read_directory(place, weights_only=weights_only)
        common = load_torch_file(place / _COMMON, weights_only=weights_only, inert=_INERT)
        contents = Contents(place, self.name)
        model, training = _split(tree)
        contents.add_model(model)
        contents.set_trainer({"common": _plain(common), "megatron": training})
        return contents.opened(world_size=metadata.world_size, provenance={"format": self.name})


def _require_dcp(place: Path) -> None:
    file = place / _CONFIG
    with explained("read", file):
        try:
            found = load_json(file.read_bytes())
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"'{file}' is malformed: {type(error).__name__}: {error}.",
                remedy="Restore it from a backup, or use another checkpoint.",
            ) from error
    if (backend, version) != (_BACKEND, 1):
        raise CheckpointError(
            f"'{place}' was saved with backend {backend!r} in version {version}; nnx reads {_BACKEND!r} in "
            "version 1.",
            remedy="Save it again with `--ckpt-format torch_dist`.",
        )


def _split(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of the model, and all other entries under Megatron's keys."""
    model = {
        name: value
        for name, value in tree.items()
        if isinstance(value, TENSORS) and not _OBJECT.fullmatch(name) and not _TRAINING.match(name)
    }
    return model, {name: _plain(value) for name, value in tree.items() if name not in model}


def _plain(value: Any) -> Any:
    """Return plain data: dicts for namespaces, and the names of classes for objects of Megatron."""
    if isinstance(value, Inert):
        return f"{type(value).__name__}{value.arguments}"
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value
