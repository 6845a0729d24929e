"""Converting and merging: any format that can be read into any that can be written, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnx.checkpoint.formats import CheckpointFormat, Progress, get_format, open_checkpoint
from nnx.checkpoint.reader import Checkpoint
from nnx.checkpoint.views import WeightsOnly
from nnx.errors import CheckpointError

__all__ = ["convert", "merge"]

_Path: TypeAlias = "str | os.PathLike[str]"
_SAFETENSORS = ".safetensors"
_TORCH_FILES = (".ckpt", ".pt", ".pth", ".bin")


def convert(
    source: _Path,
    target: _Path,
    *,
    to: str | None = None,
    weights_only: bool = True,
    save_weights_only: bool | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint in another format.

    Data is read and written a few megabytes at a time, whatever the size; `target` appears only when it is
    complete. What the format has no place for is kept in it beside its own, so converting back gives
    the same checkpoint.

    Args:
        source: A checkpoint of any known format.
        target: Where to write; nothing may be there.
        to: Name of the format. None guesses from the target's name: ``.ckpt``, ``.pt``, ``.pth`` and ``.bin``
            are ``"lightning"``, ``.safetensors`` is ``"safetensors"``, anything else is ``"nnx"``.
        weights_only: As for `open_checkpoint`: False executes code that the source may bring along.
        save_weights_only: Leave out optimizers, schedulers, state of callbacks and of ranks. None does so
            where the target is one ``.safetensors`` file.
        progress: Called with the bytes done so far and their total.
        **options: The format's own, such as ``max_shard_size`` of ``"safetensors"``.

    Raises:
        CheckpointError: The source cannot be read, the target exists or cannot be written, or the format
            cannot hold what is in the source.
    """
    form = get_format(to or _guess(target, otherwise="nnx"))
    checkpoint = open_checkpoint(source, weights_only=weights_only)
    _write(checkpoint, form, target, save_weights_only, progress, options)


def merge(
    source: _Path | Sequence[_Path],
    target: _Path,
    *,
    to: str | None = None,
    weights_only: bool = True,
    save_weights_only: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Make one file of a checkpoint that is spread over several, in bounded memory.

    Args:
        source: A checkpoint of any known format; or the files that it consists of, all of one directory.
        target: The file: ``.safetensors`` for the weights alone, anything else for Lightning's single file.
        to: ``"lightning"`` or ``"safetensors"``; None guesses from the target's name.
        weights_only: As for `convert`.
        save_weights_only: As for `convert`.
        progress: As for `convert`.

    Raises:
        CheckpointError: As for `convert`; or the files are of several directories.
    """
    form = to or _guess(target, otherwise="lightning")
    if form == "safetensors" and Path(target).suffix != _SAFETENSORS:
        raise CheckpointError(
            f"'{target}' would be a directory; merging gives one file.",
            remedy=f"Let its name end in {_SAFETENSORS}, or use `convert`.",
        )
    if form not in ("safetensors", "lightning"):
        raise CheckpointError(
            f"merging gives one file, and format {form!r} is none.",
            remedy="Use 'lightning' or 'safetensors', or `convert`.",
        )
    checkpoint = open_checkpoint(_one_path(source), weights_only=weights_only)
    _write(checkpoint, get_format(form), target, save_weights_only, progress, {})


def _guess(target: _Path, *, otherwise: str) -> str:
    suffix = Path(target).suffix
    if suffix == _SAFETENSORS:
        return "safetensors"
    return "lightning" if suffix in _TORCH_FILES else otherwise


def _write(
    checkpoint: Checkpoint,
    form: CheckpointFormat,
    target: _Path,
    save_weights_only: bool | None,
    progress: Progress | None,
    options: dict[str, Any],
) -> None:
    if save_weights_only is None:
        save_weights_only = form.name == "safetensors" and Path(target).suffix == _SAFETENSORS
    form.write(
        WeightsOnly(checkpoint) if save_weights_only else checkpoint,
        target,
        progress=progress or _ignore,
        **options,
    )


def _ignore(done: int, total: int) -> None:
    """No progress is wanted."""


def _one_path(source: _Path | Sequence[_Path]) -> _Path:
    """The checkpoint itself, or the directory of its files."""
    if isinstance(source, (str, os.PathLike)):
        return source
    files = [Path(file) for file in source]
    missing = [file for file in files if not file.exists()]
    directories = {file.parent.resolve() for file in files}
    if missing or len(directories) != 1:
        why = f"'{missing[0]}' is missing" if missing else f"they are in {len(directories)} directories"
        raise CheckpointError(
            f"{len(files)} files are not one checkpoint: {why}.",
            remedy="Name the files of one checkpoint, all in its directory.",
        )
    return files[0] if len(files) == 1 else directories.pop()
