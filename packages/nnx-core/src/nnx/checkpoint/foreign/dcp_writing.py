"""Writing a DCP directory, tensor after tensor, from a checkpoint of any format.

``dcp.save`` keeps every tensor of a file until the file is complete, so it cannot be used for what does not
fit into memory. The files written here are the same: one data file of ``torch.save`` items, each a few
megabytes of one tensor, and ``.metadata``. Tied tensors are stored once. What is no state dict goes into an
item that is a file of its own.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

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

from nnx.canonical import StoredName, numbers_parameters, stored_optimizer_states
from nnx.checkpoint._torch_compat import DCP_VERSION, new_storage_info
from nnx.checkpoint.foreign.dcp_contents import OURS
from nnx.checkpoint.foreign.dcp_files import METADATA, Keys
from nnx.checkpoint.foreign.lightning_file import lightning_dict
from nnx.checkpoint.foreign.torch_file import map_tree
from nnx.checkpoint.foreign.torch_writer import write_torch_file
from nnx.checkpoint.formats import Progress
from nnx.checkpoint.reader import Checkpoint
from nnx.checkpoint.slabs import SLAB, read_in_order, row_boxes
from nnx.checkpoint.storage.files import explained, write_file
from nnx.checkpoint.views import Described
from nnx.errors import CheckpointError
from nnx.layout import Box
from nnx.state import OptimizerState

__all__ = ["refuse_options", "state_to_write", "write_dcp_files"]

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
        checkpoint: What to write.
        model_key: Where the model goes, unless Fabric's user chose keys.
        optimizer_key: Where optimizers go, likewise; ``{}`` in it is replaced by their numbers.
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
        directory: Where; it is empty.
        checkpoint: Where `StoredName` in the others are read from.
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
