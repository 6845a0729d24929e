"""Sharded directories of Lightning's ModelParallelStrategy and FSDPStrategy, from Trainer and from Fabric.

They are DCP directories with the rest of Lightning's dict beside, in ``meta.pt``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from nnx.checkpoint.foreign.dcp_contents import OURS, interpret, is_ours
from nnx.checkpoint.foreign.dcp_directory import check_ages, looks_like_dcp, opened, read_directory
from nnx.checkpoint.foreign.dcp_writing import refuse_options, state_to_write, write_dcp_files
from nnx.checkpoint.foreign.torch_file import load_torch_file
from nnx.checkpoint.foreign.torch_writer import write_torch_file
from nnx.checkpoint.formats import CheckpointFormat, Progress
from nnx.checkpoint.reader import Checkpoint
from nnx.checkpoint.slabs import new_directory
from nnx.checkpoint.views import FABRIC_KEYS, Described
from nnx.errors import CheckpointError

__all__ = ["LightningSharded"]

_META = "meta.pt"
_MODEL_KEY = {"model_parallel": "state_dict", "fsdp": "model"}
_VERSION = "pytorch-lightning_version"


class LightningSharded(CheckpointFormat):
    """A DCP directory with ``meta.pt``."""

    name = "lightning_sharded"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return looks_like_dcp(path) and (Path(path) / _META).is_file()

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        directory = Path(path)
        meta: Any = load_torch_file(directory / _META, weights_only=weights_only)
        if not isinstance(meta, dict):
            raise CheckpointError(
                f"'{directory / _META}' holds a {type(meta).__name__}, not the rest of a checkpoint.",
                remedy="Restore it from a backup, or resume from another checkpoint.",
            )
        metadata, tree = read_directory(directory, weights_only=weights_only)
        check_ages(metadata.files, [directory / _META])
        if is_ours(meta):
            return opened(path, self.name, metadata, interpret(tree, keys=meta[OURS]["fabric"]), meta)
        by_fabric = _VERSION not in meta
        parts = interpret(tree, every_model=by_fabric)
        keys = {FABRIC_KEYS: parts.keys} if by_fabric else {}
        return opened(path, self.name, metadata, parts, {**meta, **keys})

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        strategy: Literal["model_parallel", "fsdp"] = "model_parallel",
        parameter_names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """Write a directory that Trainer resumes from with one of Lightning's own sharding strategies.

        A checkpoint that Fabric saved is written under the keys that its user chose, for Fabric.

        Args:
            checkpoint: What to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            strategy: Which strategy is to read it: they look for the model under different keys.
            parameter_names: For each optimizer that only numbers its parameters, their names.
            **options: There are no others.

        Raises:
            CheckpointError: An optimizer's parameters have no names, an object cannot be pickled, or reading
                or writing failed.
        """
        refuse_options(self.name, options)
        if strategy not in _MODEL_KEY:
            raise CheckpointError(
                f"Lightning has no sharding strategy {strategy!r}.",
                remedy=f"Use one of {', '.join(_MODEL_KEY)}.",
            )
        described = Described(checkpoint)
        state, meta = state_to_write(
            described,
            model_key=_MODEL_KEY[strategy],
            optimizer_key="optimizer_{}",
            parameter_names=parameter_names,
            named_only=True,
        )
        with new_directory(path) as directory:
            write_dcp_files(directory, described, state, progress=progress)
            nothing: Progress = lambda done, total: None  # noqa: E731
            write_torch_file(directory / _META, meta, described, name="archive", progress=nothing)
