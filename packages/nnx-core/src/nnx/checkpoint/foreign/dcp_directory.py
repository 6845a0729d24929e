"""Directories of `torch.distributed.checkpoint`, as ``dcp.save`` writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx.canonical import stored_optimizer_states
from nnx.checkpoint.foreign.contents import Contents, ForeignCheckpoint
from nnx.checkpoint.foreign.dcp_contents import (
    OURS,
    TRAINER,
    Parts,
    add_parts,
    interpret,
    is_ours,
    nest,
    restore_ours,
)
from nnx.checkpoint.foreign.dcp_files import (
    DcpMetadata,
    Items,
    metadata_files,
    read_metadata,
    read_shards,
    shard_files,
)
from nnx.checkpoint.foreign.dcp_writing import refuse_options, state_to_write, write_dcp_files
from nnx.checkpoint.formats import CheckpointFormat, Progress
from nnx.checkpoint.reader import Checkpoint
from nnx.checkpoint.slabs import new_directory
from nnx.checkpoint.storage.files import explained
from nnx.checkpoint.views import Described
from nnx.errors import CheckpointError

__all__ = ["DcpDirectory", "check_ages", "looks_like_dcp", "opened", "read_directory"]

log = logging.getLogger(__name__)

_DATA = ".distcp"
_PAUSE = 10.0
"""Seconds that may pass between two files of one save, beside the time that writing takes."""
_SLOWEST = 10e6
"""Bytes per second below which nobody copies a checkpoint."""
_SKEW = 2.0
"""Seconds by which the clocks of two machines may differ."""


class DcpDirectory(CheckpointFormat):
    """What ``dcp.save`` writes: ``.metadata`` and files of every rank, or safetensors files without it."""

    name = "dcp"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return looks_like_dcp(path) or bool(shard_files(Path(path)))

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        if not looks_like_dcp(path):
            return opened(path, self.name, DcpMetadata(), interpret(read_shards(Path(path))), {})
        metadata, tree = read_directory(Path(path), weights_only=weights_only)
        beside = tree.pop(TRAINER) if is_ours(tree.get(TRAINER)) else {}
        parts = interpret(tree, keys=beside.get(OURS, {}).get("fabric"))
        if "state_dict" in parts.models and parts.optimizers:
            log.warning(
                "%s was written by Lightning but lacks its meta.pt: step, schedulers and callbacks are lost.",
                path,
            )
        return opened(path, self.name, metadata, parts, beside)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        parameter_names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """Write a directory that ``dcp.load`` and ``dcp_to_torch_save`` read.

        The model is under ``model`` and the optimizer under ``optimizer``, both by parameter name, as torch's
        ``get_state_dict`` has them; several are ``optimizer_0``, ``optimizer_1`` and so on. What Trainer and
        nnx need besides is under ``trainer``.

        Args:
            checkpoint: What to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            parameter_names: For each optimizer that only numbers its parameters, their names.
            **options: There are no others.

        Raises:
            CheckpointError: An object cannot be pickled, or reading or writing failed.
        """
        refuse_options(self.name, options)
        described = Described(checkpoint)
        several = len(stored_optimizer_states(described) or ()) > 1
        state, beside = state_to_write(
            described,
            model_key="model",
            optimizer_key="optimizer_{}" if several else "optimizer",
            parameter_names=parameter_names,
        )
        with new_directory(path) as directory:
            write_dcp_files(directory, described, state, objects=(TRAINER, beside), progress=progress)


def looks_like_dcp(path: str | os.PathLike[str]) -> bool:
    """Whether there are files with the names that DCP gives them."""
    directory = Path(path)
    if "://" in os.fspath(path) or not directory.is_dir():
        return False
    return bool(metadata_files(directory)) or any(file.suffix == _DATA for file in directory.iterdir())


def read_directory(directory: Path, *, weights_only: bool) -> tuple[DcpMetadata, dict[str, Any]]:
    """Find every tensor and read every object of a directory.

    Args:
        directory: The checkpoint.
        weights_only: False executes what its pickles bring along.

    Returns:
        The metadata, and the state dict that was saved, with `LocatedTensor` in place of tensors.

    Raises:
        CheckpointError: It is incomplete, damaged, malicious, or of two saves.
    """
    metadata = read_metadata(directory, weights_only=weights_only)
    with Items(directory, weights_only=weights_only) as items:
        items.check_lengths(metadata.items)
        check_ages([directory / file for file in metadata.data_files], metadata.files)
        values: dict[str, Any] = {name: items.load(name, item) for name, item in metadata.objects.items()}
        for name, tensor in sorted(metadata.tensors.items(), key=lambda pair: pair[1].position):
            values[name] = items.locate(tensor)
    return metadata, nest({name: values[name] for name in metadata.keys}, metadata.keys)


def opened(
    path: str | os.PathLike[str],
    format: str,
    metadata: DcpMetadata,
    parts: Parts,
    beside: Mapping[str, Any],
) -> ForeignCheckpoint:
    """The checkpoint, from its parts.

    Args:
        path: The directory.
        format: Name of its format.
        metadata: What it claims to hold.
        parts: The state dict, taken apart.
        beside: Objects of the trainer that lie beside the state dict.
    """
    contents = Contents(path, format)
    beside = dict(beside)
    origin = restore_ours(contents, beside)
    add_parts(contents, parts, beside)
    if origin is not None:
        return contents.opened(**origin)
    directory = Path(path)
    unused = sorted(
        file.name
        for file in directory.iterdir()
        if file.suffix == _DATA and file.name not in metadata.data_files
    )
    provenance: dict[str, Any] = {"keys": parts.keys}
    if unused:
        provenance["files of another save"] = unused
    return contents.opened(world_size=metadata.world_size, provenance=provenance)


def check_ages(earlier: Sequence[Path], later: Sequence[Path]) -> None:
    """Refuse files of two saves, as far as their times tell.

    DCP overwrites a directory's files one by one under the same names, and its metadata last. When that is
    interrupted, data of two steps lies side by side, and only the times betray it: data that is newer than
    the metadata, after a pause. A copy may have times in any order, but no pause.

    Args:
        earlier: Files that were complete before any of `later` was written.
        later: The others.

    Raises:
        CheckpointError: They were written in the wrong order, with a pause between.
    """
    times: dict[Path, float] = {}
    sizes: dict[Path, int] = {}
    for path in (*earlier, *later):
        with explained("read", path):
            status = path.stat()
        times[path], sizes[path] = status.st_mtime, status.st_size
    end = max(times[path] for path in later)
    late = sorted((path for path in earlier if times[path] > end + _SKEW), key=times.__getitem__)
    if not late:
        return
    first = late[0]
    before = max(time for path, time in times.items() if path not in late)
    pause = times[first] - before
    names = ", ".join(path.name for path in late[:4]) + (", ..." if len(late) > 4 else "")
    if pause > _PAUSE + sizes[first] / _SLOWEST:
        raise CheckpointError(
            f"'{first.parent}' holds files of two saves: {names} were written {pause:.0f} seconds after "
            "the rest, by a save into the same directory that was interrupted.",
            remedy=f"Resume from another checkpoint. If you know that it is whole, `touch {later[-1]}`.",
        )
    log.warning(
        "%s in %s is newer than %s. That is so in a copy; otherwise the files are of two saves.",
        names,
        first.parent,
        later[-1].name,
    )
