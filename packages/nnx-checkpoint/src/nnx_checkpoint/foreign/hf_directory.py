"""Read and write directories of Hugging Face: ``config.json``, safetensors with an index, a tokenizer.

Names in the directory are those that ``from_pretrained`` wants. `nnx_checkpoint.foreign.hf_plan` chooses them
for writing, and `nnx_checkpoint.foreign.name_maps` translates them back. No code in it is executed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint
from nnx_checkpoint.foreign.hf_config import CONFIG, Config, read_config
from nnx_checkpoint.foreign.hf_plan import WRITTEN, planned
from nnx_checkpoint.foreign.name_maps import NameMap, name_map, registered_map
from nnx_checkpoint.foreign.safetensors import (
    add_stored,
    add_training_state,
    located,
    read_headers,
)
from nnx_checkpoint.foreign.safetensors_writing import (
    INDEX,
    MODEL,
    PREFIX_KEY,
    SHARD_SIZE,
    SUFFIX,
    TRAINING,
    WEIGHTS,
    SafetensorsWriting,
)
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import Described, WeightsOnly
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory, refuse_existing
from nnx_checkpoint.storage.files import read_exactly, write_file

NAMES_KEY = "nnx.names"
_SHARD = re.compile(rf"{WEIGHTS}-\d+-of-(\d+){re.escape(SUFFIX)}")
_POINTER = b"version https://git-lfs"
_KEPT = re.compile(r"[^.].*\.(json|txt|model|jinja|tiktoken|vocab|bpe)|(LICENSE|NOTICE)(\.[a-z]+)?")
"""Files beside the weights that are copied: configurations, tokenizers, templates, licenses; no code."""


class HuggingFaceDirectory(CheckpointFormat):
    """A directory with ``config.json`` and ``model.safetensors``, or several such files and their index."""

    name = "hf"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        return (place / CONFIG).is_file() and any(_is_weights(name) for name in _names_in(place))

    @override
    def open(
        self, path: str | os.PathLike[str], *, weights_only: bool = True, names: Any = None
    ) -> ForeignCheckpoint:
        """Open a directory.

        Args:
            path: The directory.
            weights_only: Not used: nothing in the directory is executed.
            names: The map of names of the directory, as in `write`. By default the one that nnx recorded in
                its files, or the registered map of the configuration's ``model_type``.

        Raises:
            CheckpointError: A file is missing, damaged, or not of this checkpoint, or the map does not fit.
        """
        place = Path(path)
        config = read_config(place)
        _refuse_partial(place)
        headers, _ = read_headers(place)
        metadata = {key: value for header in headers.values() for key, value in header.metadata.items()}
        contents = Contents(place, self.name)
        contents.objects["extra"] = {}
        tensors = [(tensor, file) for file, header in headers.items() for tensor in header.tensors]
        aliases = _aliases({tensor.name for tensor, _ in tensors}, metadata)
        stored = [*(tensor.name for tensor, _ in tensors), *aliases]
        translated, contents.omits_prefix = _in_module(stored, metadata, config, names)
        for tensor, file in tensors:
            if tensor.name in translated:
                add_stored(contents, f"{MODEL}{translated[tensor.name]}", tensor, file)
        for alias, name in aliases.items():
            if alias in translated and name in translated:
                contents.aliases[f"{MODEL}{translated[alias]}"] = f"{MODEL}{translated[name]}"
        origin: dict[str, Any] = {"provenance": {"format": self.name, "model_type": config.model_type}}
        if (place / f"{TRAINING}.json").exists():
            origin = add_training_state(contents, place)
        return contents.opened(**origin)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        config: str | os.PathLike[str] | None = None,
        names: Any = None,
        max_shard_size: int = SHARD_SIZE,
        **options: Any,
    ) -> None:
        """Write a directory that ``from_pretrained`` reads.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            config: The model's ``config.json``, or a directory with it and files of a tokenizer, which are
                copied. A checkpoint that is such a directory has its own.
            names: The map of names: rules, the path of a JSON file, or the name of a registered map. By
                default the prefix is removed that the names in transformers' class do not have.
            max_shard_size: The most bytes of weights in one file; more are split over several, with an index.
            **options: No other options exist.

        Raises:
            CheckpointError: There is no configuration, the tensors are not those of its model, the map does
                not fit, or reading or writing failed.
        """
        self.refuse_options(options)
        refuse_existing(Path(path))
        found = _config_for(checkpoint, config)
        is_partial = isinstance(checkpoint, WeightsOnly)
        given = None if names is None else name_map(names)
        plan = planned(checkpoint, found, given, must_take_all=is_partial)
        recorded = {PREFIX_KEY: plan.prefix} if plan.prefix else {}
        if plan.names is not None:
            recorded[NAMES_KEY] = json.dumps(plan.names.data)
        job = SafetensorsWriting(Described(plan.renamed(checkpoint)), WRITTEN, progress, recorded)
        with new_directory(path) as directory:
            job.write_weights(directory, max_shard_size)
            if not is_partial:
                job.write_training_state(directory)
            write_file(directory / CONFIG, found.with_dtype(plan.dtype_name))
            for file in _kept_beside(found):
                shutil.copyfile(file, directory / file.name)


def _names_in(place: Path) -> list[str]:
    return sorted(os.listdir(place))  # noqa: PTH208


def _is_weights(name: str) -> bool:
    return name in (f"{WEIGHTS}{SUFFIX}", f"{WEIGHTS}{INDEX}") or _SHARD.fullmatch(name) is not None


def _refuse_partial(place: Path) -> None:
    """Refuse shards without an index, missing shards, shards of another save, and files not yet fetched."""
    names = _names_in(place)
    shards = [name for name in names if _SHARD.fullmatch(name)]
    for name in names:
        if name.endswith((SUFFIX, INDEX)) and _starts_as_pointer(place / name):
            raise _partial(place, f"'{name}' is a pointer of Git LFS", "Run `git lfs pull` there.")
    if f"{WEIGHTS}{INDEX}" not in names:
        if shards and f"{WEIGHTS}{SUFFIX}" not in names:
            raise _partial(place, f"'{shards[0]}' is there, and the index '{WEIGHTS}{INDEX}' is missing")
        if shards:
            raise _foreign(place, shards[0], f"'{WEIGHTS}{SUFFIX}' has all weights")
        return
    files, _, _ = located(place)
    listed = [file.name for file in files]
    missing = [name for name in listed if name not in names or not (place / name).exists()]
    if missing:
        raise _partial(
            place, f"{len(missing)} of the {len(listed)} files in the index are missing, the first is "
            f"'{missing[0]}'"
        )  # fmt: skip
    foreign = [name for name in shards if name not in listed]
    if foreign:
        raise _foreign(place, foreign[0], f"the index '{WEIGHTS}{INDEX}' does not name it")


def _starts_as_pointer(file: Path) -> bool:
    return (
        file.exists()
        and file.stat().st_size >= len(_POINTER)
        and (read_exactly(file, len(_POINTER)) == _POINTER)
    )


def _partial(place: Path, why: str, remedy: str = "Download the rest.") -> CheckpointError:
    return CheckpointError(f"the download of '{place}' is not complete: {why}.", remedy=remedy)


def _foreign(place: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{place / name}' does not belong to the model there: {why}.",
        remedy="Remove it, or download the directory again.",
    )


def _in_module(
    stored: Sequence[str], metadata: Mapping[str, str], config: Config, given: Any
) -> tuple[dict[str, str], bool]:
    """Return the name in the module of each stored name, and True if the names may lack a prefix."""
    if given is not None:
        return name_map(given).to_module(stored), False
    recorded, prefix = metadata.get(NAMES_KEY), metadata.get(PREFIX_KEY)
    if recorded is not None:
        rules: NameMap | None = NameMap.of(_decoded(recorded), "in the files")
    else:
        rules = registered_map(config.model_type)
    translated = {name: name for name in stored} if rules is None else rules.to_module(stored)
    names = {name: f"{prefix or ''}{other}" for name, other in translated.items()}
    return names, recorded is None and prefix is None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _aliases(stored: Container[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the ties in the metadata, which is free text."""
    return {alias: name for alias, name in metadata.items() if name in stored and alias not in stored}


def _config_for(checkpoint: Checkpoint, given: str | os.PathLike[str] | None) -> Config:
    if given is not None:
        return read_config(Path(given))
    if checkpoint.format == HuggingFaceDirectory.name:
        return read_config(Path(checkpoint.path))
    raise CheckpointError(
        "a directory of Hugging Face needs the configuration of the model, and none was given.",
        remedy="Pass --config (in Python, config=), a config.json or a directory with one.",
    )


def _kept_beside(config: Config) -> list[Path]:
    """Return the files to copy; none if the configuration was given as a file."""
    if config.directory is None:
        return []
    return [
        config.directory / name
        for name in _names_in(config.directory)
        if _KEPT.fullmatch(name)
        and name != CONFIG
        and not name.endswith(".index.json")
        and not name.startswith(TRAINING)
        and (config.directory / name).is_file()
    ]
