"""Read the ``config.json`` of a model, as data only."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.storage.files import read_exactly

CONFIG = "config.json"

log = logging.getLogger("nnx.checkpoint")


@dataclass(frozen=True)
class Config:
    """The configuration of a model.

    Attributes:
        file: The file.
        directory: The directory with further files of the model; None if a file was given.
        content: The JSON object.
    """

    file: Path
    directory: Path | None
    content: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The name of the family of models; empty if there is none."""
        return str(self.content.get("model_type", ""))

    @property
    def architecture(self) -> str | None:
        """The name of the class; None if there is none."""
        found = self.content.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else None

    @property
    def has_remote_code(self) -> bool:
        """True if the class is in Python files of the directory, which are never executed."""
        return "auto_map" in self.content

    def with_dtype(self, dtype_name: str | None) -> bytes:
        """Return the JSON with the element type of the weights: ``from_pretrained`` converts to it."""
        content = dict(self.content)
        key = "torch_dtype" if "torch_dtype" in content else "dtype"
        if dtype_name is not None and content.get(key) != dtype_name:
            if content.get(key) is not None:
                log.warning("Writing %s %s into config.json, not %s", key, dtype_name, content[key])
            content[key] = dtype_name
        return (json.dumps(content, indent=2) + "\n").encode()


def read_config(given: Path) -> Config:
    """Read a ``config.json``, or the one in a directory.

    Raises:
        CheckpointError: There is none, or it is no JSON object.
    """
    directory = given if given.is_dir() else None
    file = given / CONFIG if directory else given
    if not file.is_file():
        raise CheckpointError(
            f"there is no configuration '{file}'.",
            remedy="Name the config.json of the model, or a directory with one (not a name of the hub).",
        )
    try:
        content = load_json(read_exactly(file, file.stat().st_size))
        if not isinstance(content, dict):
            raise TypeError(f"it is a {type(content).__name__}")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"'{file}' is no configuration of a model: {error}.", remedy="Restore it, or use another one."
        ) from error
    return Config(file, directory, content)
