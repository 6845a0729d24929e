"""Directories of `torch.distributed.checkpoint`, as ``dcp.save`` writes them, and Lightning's sharded ones.

They are read by what `nnx_checkpoint.foreign.dcp_files` finds in them, and written here, tensor after tensor,
from a checkpoint of any format.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from nnx_checkpoint._torch_compat import DCP_VERSION, new_storage_info
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint
from nnx_checkpoint.foreign.dcp_contents import (
    OURS,
    TRAINER,
    Parts,
    add_parts,
    interpret,
    is_ours,
    nest,
    restore_ours,
)
from nnx_checkpoint.foreign.dcp_files import (
    METADATA,
    DcpMetadata,
    Items,
    Keys,
    metadata_files,
    read_metadata,
    read_shards,
    shard_files,
)
from nnx_checkpoint.foreign.lightning_file import lightning_dict
from nnx_checkpoint.foreign.torch_file import load_torch_file, map_tree
from nnx_checkpoint.foreign.torch_writer import write_torch_file
from nnx_checkpoint.formats import CheckpointFormat, Progress
from nnx_checkpoint.naming import (
    FABRIC_KEYS,
    OptimizerState,
    StoredName,
    numbers_parameters,
    stored_optimizer_states,
)
from nnx_checkpoint.reader import Checkpoint
from nnx_checkpoint.shard import Box
from nnx_checkpoint.slabs import SLAB, new_directory, read_in_order, row_boxes
from nnx_checkpoint.storage.files import explained, write_file
from nnx_checkpoint.views import Described

__all__ = ["DcpDirectory", "LightningSharded"]


# --- writing a directory --------------------------------------------------------------------------
# ``dcp.save`` keeps every tensor of a file until the file is complete, so it cannot be used for what does
# not fit into memory. The files written here are the same: one data file of ``torch.save`` items, each a
# few megabytes of one tensor, and ``.metadata``. Tied tensors are stored once. What is no state dict goes
# into an item that is a file of its own.


_DATA, _OBJECT = "__0_0.distcp", "__0_1.distcp"
_BUFFER = 1 << 20

ParameterNames = Sequence[Sequence[str]]
"""For each optimizer, the name of parameter 0, 1, ..."""


def refuse_options(format: str, options: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` for options that nothing would honour."""
    if options:
        raise CheckpointError(
            f"format {format!r} has no option {next(iter(options))!r}.",
            remedy="See its `write` method for those it has.",
        )


# --- what is written ------------------------------------------------------------------------------


def state_to_write(
    checkpoint: Described,
    *,
    model_key: str,
    optimizer_key: str,
    parameter_names: ParameterNames | None,
    named_only: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict for DCP, and the trainer's objects.

    Args:
        checkpoint: The checkpoint to write.
        model_key: The key for the model, unless Fabric's user chose keys.
        optimizer_key: The key for optimizers, likewise; ``{}`` in it is replaced by their numbers.
        parameter_names: Names for parameters that have only numbers.
        named_only: Refuse parameters that have no names even so.

    Returns:
        Both with `StoredName` in place of tensors.

    Raises:
        CheckpointError: The names given do not fit.
    """
    rest = lightning_dict(checkpoint)
    rest.pop("optimizer_states", None)
    states = stored_optimizer_states(checkpoint) or []
    if parameter_names is not None:
        states = _renamed(states, parameter_names)
    if named_only:
        _require_names(checkpoint.path, states)
    keys = rest[OURS]["fabric"]
    if keys is None:
        state = {model_key: rest.pop("state_dict")} if "state_dict" in rest else {}
        names = [optimizer_key.format(index) for index in range(len(states))]
    else:
        state = {key: rest.pop(key) for key in keys["modules"]}
        names = list(keys["optimizers"])
        for key in names:
            rest.pop(key, None)
        if len(state) > 1:
            states = [_without_prefix(each, list(state)) for each in states]
    for name, each in zip(names, states, strict=True):
        state[name] = {**each, "param_groups": [_with_names(group) for group in each["param_groups"]]}
    return state, rest


def _renamed(states: Sequence[OptimizerState], names: ParameterNames) -> list[OptimizerState]:
    counts = [sum(len(group["params"]) for group in state["param_groups"]) for state in states]
    if [len(of_one) for of_one in names] != counts:
        raise CheckpointError(
            f"`parameter_names` has {[len(of_one) for of_one in names]} names for the optimizers, "
            f"which have {counts} parameters.",
            remedy="Pass one list for each optimizer, with the names in the order of its groups.",
        )
    return [_rename(state, dict(enumerate(of_one))) for state, of_one in zip(states, names, strict=True)]


def _without_prefix(state: OptimizerState, modules: Sequence[str]) -> OptimizerState:
    """Names as in the module that the parameters belong to."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    for key in modules:
        if names and all(str(name).startswith(f"{key}.") for name in names):
            return _rename(state, {name: name.removeprefix(f"{key}.") for name in names})
    return state


def _rename(state: OptimizerState, names: Mapping[Any, str]) -> OptimizerState:
    return OptimizerState(
        state={names.get(old, old): entries for old, entries in state["state"].items()},
        param_groups=[
            {**group, "params": [names.get(old, old) for old in group["params"]]}
            for group in state["param_groups"]
        ],
    )


def _with_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers built from ``named_parameters()`` ask for the names as well."""
    if any(isinstance(name, int) for name in group["params"]):
        return dict(group)
    return {**group, "param_names": list(group["params"])}


def _require_names(path: Any, states: Sequence[OptimizerState]) -> None:
    """Refuse optimizers whose parameters have only numbers."""
    for index, state in enumerate(states):
        if numbers_parameters(state):
            raise CheckpointError(
                f"optimizer {index} of '{path}' numbers its parameters, and Lightning's sharded "
                "directories name them.",
                remedy="Pass `parameter_names`, a list of names for each optimizer in the order of its "
                "groups; or resume once with any strategy of nnx, save, and convert that.",
            )


# --- writing it -----------------------------------------------------------------------------------


def write_dcp_files(
    directory: Path,
    checkpoint: Described,
    state: Mapping[str, Any],
    *,
    objects: tuple[str, Any] | None = None,
    progress: Progress,
) -> None:
    """Write the files of a DCP directory.

    Args:
        directory: The directory to write into, which is empty.
        checkpoint: The checkpoint that each `StoredName` in the others is read from.
        state: The state dict.
        objects: A further key, and one object for it that is stored as a whole.
        progress: Told how many bytes of tensors are done.

    Raises:
        CheckpointError: An object cannot be pickled, or reading or writing failed.
    """
    metadata = Metadata({}, planner_data={}, storage_data={})
    metadata.storage_meta = StorageMeta()
    metadata.version = DCP_VERSION
    leaves = list(_flattened(state, ()))
    with explained("write", directory / _DATA), (directory / _DATA).open("xb", buffering=_BUFFER) as file:
        tensors: dict[str, list[str]] = {}
        for keys, value in leaves:
            name = _announce(metadata, keys)
            if isinstance(value, StoredName):
                tensors.setdefault(checkpoint.entry(value.key).name, []).append(name)
            else:
                _write_object(file, metadata, name, value)
        _write_tensors(file, metadata, checkpoint, tensors, progress)
        file.flush()
        os.fsync(file.fileno())
    if objects is not None:
        name = _announce(metadata, (objects[0],))
        path = directory / _OBJECT
        write_torch_file(path, objects[1], checkpoint, name="archive", progress=lambda done, total: None)
        _place(metadata, name, None, _OBJECT, 0, path.stat().st_size)
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
    write_file(directory / METADATA, pickle.dumps(metadata))


def _flattened(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """As DCP flattens a state dict: every dict, and lists in which there is a dict or a tensor."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(item, (*keys, str(key)))
    elif isinstance(value, list) and _holds_containers(value):
        for position, item in enumerate(value):
            yield from _flattened(item, (*keys, position))
    else:
        yield keys, value


def _holds_containers(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, (Mapping, Tensor, StoredName))
        or (isinstance(value, list) and _holds_containers(value))
        for value in values
    )


def _announce(metadata: Metadata, keys: Keys) -> str:
    name = ".".join(str(key) for key in keys)
    if name in metadata.planner_data:
        raise CheckpointError(
            f"two entries of the checkpoint would both be called '{name}' in a DCP directory.",
            remedy="Convert to another format.",
        )
    metadata.planner_data[name] = keys
    return name


def _write_object(file: BinaryIO, metadata: Metadata, name: str, value: Any) -> None:
    whole = map_tree(value, lambda leaf: leaf.stored.read(leaf.key) if isinstance(leaf, StoredName) else leaf)
    if isinstance(whole, Tensor):
        _write_part(file, metadata, [name], Box.whole(whole.shape), whole.contiguous())
        _describe(metadata, name, whole.shape, whole.dtype, [Box.whole(whole.shape)])
        return
    buffer = io.BytesIO()
    try:
        torch.save(whole, buffer)
    except Exception as error:  # pickle raises what the object's own methods raise
        raise CheckpointError(
            f"'{name}' cannot be pickled: {type(error).__name__}: {error}.",
            remedy="Convert to another format, or to the weights alone.",
        ) from error
    start = file.tell()
    file.write(buffer.getbuffer())
    _place(metadata, name, None, _DATA, start, file.tell() - start)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()


def _write_tensors(
    file: BinaryIO,
    metadata: Metadata,
    checkpoint: Checkpoint,
    names: Mapping[str, Sequence[str]],
    progress: Progress,
) -> None:
    """Write stored tensors, each under one or more names."""
    boxes = {
        stored: list(row_boxes(entry.shape, entry.itemsize, SLAB))
        for stored, entry in ((stored, checkpoint.entry(stored)) for stored in names)
    }
    for stored, flat_names in names.items():
        entry = checkpoint.entry(stored)
        for name in flat_names:
            _describe(metadata, name, entry.shape, entry.dtype, boxes[stored])
    remaining = {stored: iter(of_one) for stored, of_one in boxes.items()}
    for part in read_in_order(checkpoint, names, progress=progress):
        box, dtype = next(remaining[part.name]), checkpoint.entry(part.name).dtype
        flat = torch.frombuffer(part.data, dtype=dtype) if part.data else torch.empty(0, dtype=dtype)
        _write_part(file, metadata, names[part.name], box, flat.view(box.size))


def _write_part(file: BinaryIO, metadata: Metadata, names: Sequence[str], box: Box, data: Tensor) -> None:
    start = file.tell()
    torch.save(data, file)
    for name in names:
        _place(metadata, name, box, _DATA, start, file.tell() - start)


def _describe(
    metadata: Metadata, name: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]
) -> None:
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in boxes]
    properties = TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _place(metadata: Metadata, name: str, box: Box | None, file: str, start: int, length: int) -> None:
    index = MetadataIndex(name, None if box is None else box.offset)
    metadata.storage_data[index] = new_storage_info(file, start, length)


# --- the format ``dcp`` ---------------------------------------------------------------------------


log = logging.getLogger("nnx.checkpoint")

_SUFFIX = ".distcp"
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
            checkpoint: The checkpoint to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            parameter_names: The names of parameters for each optimizer that only numbers them.
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
    return bool(metadata_files(directory)) or any(file.suffix == _SUFFIX for file in directory.iterdir())


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
        metadata: The metadata, which say what it claims to hold.
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
        if file.suffix == _SUFFIX and file.name not in metadata.data_files
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


# --- the format ``lightning_sharded`` -------------------------------------------------------------
# Sharded directories of Lightning's ModelParallelStrategy and FSDPStrategy, from Trainer and from Fabric,
# are DCP directories with the rest of Lightning's dict beside, in ``meta.pt``.


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
            checkpoint: The checkpoint to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            strategy: The strategy that is to read it: they look for the model under different keys.
            parameter_names: The names of parameters for each optimizer that only numbers them.
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
