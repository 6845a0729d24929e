"""Read and write directories of ``dcp.save``, and Lightning's sharded directories.

`nnx_checkpoint.foreign.dcp_files` reads their files; this module interprets them. DCP stores any nested state
dict, and each program puts models and optimizers under its own keys. `interpret` recognizes the usual ones by
key and by form. Other entries stay under their own keys, with the trainer's objects. `state_to_write` makes
such a state dict of any checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import TENSORS, Contents, ForeignCheckpoint
from nnx_checkpoint.foreign.dcp_files import Items, read_shards, shard_files
from nnx_checkpoint.foreign.dcp_metadata import DcpMetadata, metadata_files, read_metadata
from nnx_checkpoint.foreign.dcp_state_dict import (
    GROUPS,
    OURS,
    STATE,
    TRAINER,
    ParameterNames,
    Parts,
    _optimizer,
    add_parts,
    is_flattened,
    is_ours,
    nest,
    restore_ours,
)
from nnx_checkpoint.foreign.dcp_writing import write_dcp_files
from nnx_checkpoint.foreign.lightning_file import lightning_dict
from nnx_checkpoint.foreign.torch_archive import write_torch_file
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import (
    FABRIC_KEYS,
    Described,
    OptimizerState,
    numbers_parameters,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.unpickling.torch_file import load_torch_file

log = logging.getLogger("nnx.checkpoint")

_SUFFIX = ".distcp"
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_EXTRA_STATE = "_extra_state"


def interpret(
    tree: Mapping[str, Any], *, keys: Mapping[str, Sequence[str]] | None = None, every_model: bool = False
) -> Parts:
    """Split a state dict into models, optimizers and other entries.

    An optimizer is any dict with the form of one, nested or flattened, under any key. The model is the entry
    under one of the usual keys; without such a key, the tensors at the top level; without those, every dict
    with tensors only. One level around all entries, as in ``{"app": ...}``, is skipped.

    Args:
        tree: The state dict, with tensors still in the files.
        keys: The keys that are ``modules`` and ``optimizers``, if known.
        every_model: True treats every dict with tensors only as a model.

    Raises:
        CheckpointError: An optimizer's state is malformed.
    """
    if keys is not None:
        return _by_keys(tree, keys)
    tree = _unwrapped(tree)
    if is_optimizer(tree):
        return Parts(optimizers={"optimizer": _optimizer(tree)})
    parts = Parts(rest=dict(tree))
    found = {key: state for name, value in tree.items() for key, state in _optimizers(name, value)}
    for key in sorted(found, key=_natural):
        parts.optimizers[key] = _optimizer(found[key])
        parts.rest.pop(key.partition("[")[0], None)
    dicts = [key for key, value in parts.rest.items() if holds_tensors_only(value)]
    usual = [key for key in _MODEL_KEYS if isinstance(parts.rest.get(key), dict)][:1]
    if every_model or usual:
        parts.models = {key: _flat(parts.rest.pop(key)) for key in (dicts if every_model else usual)}
    elif any(isinstance(value, TENSORS) for value in parts.rest.values()):
        names = [k for k, value in parts.rest.items() if isinstance(value, TENSORS) or _is_extra(k)]
        parts.models = {"model": _flat({name: parts.rest.pop(name) for name in names})}
    else:
        parts.models = {key: _flat(parts.rest.pop(key)) for key in dicts}
    return parts


def _by_keys(tree: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> Parts:
    rest = dict(tree)
    nothing: dict[str, Any] = {STATE: {}, GROUPS: []}
    return Parts(
        models={key: _flat(rest.pop(key, {})) for key in keys["modules"]},
        optimizers={key: _optimizer(rest.pop(key, nothing)) for key in keys["optimizers"]},
        rest=rest,
    )


def _unwrapped(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(tree) != 1:
        return tree
    (key, inner), *_ = tree.items()
    if key in _MODEL_KEYS or not isinstance(inner, dict) or is_optimizer(inner):
        return tree
    holds_parts = any(
        (name in _MODEL_KEYS and isinstance(value, dict)) or is_optimizer(value)
        for name, value in inner.items()
    )
    return inner if holds_parts else tree


def _optimizers(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if is_optimizer(value):
        yield key, value
    elif isinstance(value, list) and value and all(is_optimizer(item) for item in value):
        for position, item in enumerate(value):
            yield f"{key}[{position}]", item


def is_optimizer(value: Any) -> bool:
    """Return True if a value has the form of an optimizer's state dict, nested or flattened."""
    if not isinstance(value, dict):
        return False
    groups = value.get(GROUPS)
    if isinstance(groups, list):
        return all(isinstance(group, dict) and "params" in group for group in groups)
    return is_flattened(value)


def holds_tensors_only(value: Any) -> bool:
    """Return True if a value has the form of a module's state dict."""
    return isinstance(value, dict) and bool(value) and all(_is_member(*pair) for pair in value.items())


def _is_member(key: str, value: Any) -> bool:
    """Return True if this can be an entry of a module's state dict."""
    return isinstance(value, TENSORS) or _is_extra(key) or holds_tensors_only(value)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _flat(model: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested state dicts by joining keys (extra state stays unchanged)."""
    flat: dict[str, Any] = {}
    for key, value in model.items():
        if isinstance(value, dict) and not _is_extra(key):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _natural(key: str) -> list[Any]:
    """Return a sort key that puts ``optimizer_10`` after ``optimizer_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def state_to_write(
    checkpoint: Described,
    *,
    model_key: str,
    optimizer_key: str,
    parameter_names: ParameterNames | None,
    named_only: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict for DCP, and the trainer's objects.

    Args:
        checkpoint: The checkpoint to write.
        model_key: The key of the model, unless the user of Fabric chose keys.
        optimizer_key: The key of optimizers, unless chosen; ``{}`` in it is replaced by their numbers.
        parameter_names: Names of parameters that have only numbers.
        named_only: True refuses parameters that still have no names.

    Returns:
        Both with `StoredName` in place of tensors.

    Raises:
        CheckpointError: The given names do not match the parameters.
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


def items_to_write(
    checkpoint: Described, parameter_names: ParameterNames | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `state_to_write` under ``model``, and ``optimizer`` or ``optimizer_0``, ``optimizer_1``, ..."""
    several = len(stored_optimizer_states(checkpoint) or ()) > 1
    return state_to_write(
        checkpoint,
        model_key="model",
        optimizer_key="optimizer_{}" if several else "optimizer",
        parameter_names=parameter_names,
    )


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
    """Return the state with names relative to the module that owns the parameters."""
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
    """Return a group with ``param_names``, which optimizers built from ``named_parameters()`` require."""
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


def looks_like_dcp(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory has files with the names of DCP."""
    directory = Path(path)
    if "://" in os.fspath(path) or not directory.is_dir():
        return False
    return bool(metadata_files(directory)) or any(file.suffix == _SUFFIX for file in directory.iterdir())


def read_directory(directory: Path, *, weights_only: bool) -> tuple[DcpMetadata, dict[str, Any]]:
    """Find every tensor and read every object of a directory.

    Args:
        directory: The checkpoint.
        weights_only: False executes code in its pickles.

    Returns:
        The metadata, and the saved state dict with tensors still in the files.

    Raises:
        CheckpointError: The directory is incomplete, damaged, malicious, or mixes two saves.
    """
    metadata = read_metadata(directory, weights_only=weights_only)
    with Items(directory, weights_only=weights_only) as items:
        items.check_lengths(metadata.items)
        check_ages([directory / file for file in metadata.data_files], metadata.files)
        values = {name: items.load(name, item) for name, item in metadata.objects.items()}
        values |= {name: items.locate(name, tensor) for name, tensor in metadata.tensors.items()}
    return metadata, nest({name: values[name] for name in metadata.keys}, metadata.keys)


def opened(
    path: str | os.PathLike[str],
    format: str,
    metadata: DcpMetadata,
    parts: Parts,
    beside: Mapping[str, Any],
) -> ForeignCheckpoint:
    """Return the checkpoint of a split state dict.

    Args:
        path: The directory.
        format: Name of its format.
        metadata: The metadata, with the claimed tensors.
        parts: The state dict, split.
        beside: Objects of the trainer that are stored beside the state dict.
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


_PAUSE = 10.0
"""Seconds that may pass between two files of a copy, in addition to the time to copy the second one."""
_SLOWEST = 10e6
"""The slowest plausible copy of a checkpoint, in bytes per second."""


def check_ages(earlier: Iterable[Path], later: Sequence[Path]) -> None:
    """Refuse a directory with files of two saves, judged by their modification times.

    DCP overwrites a directory's files one by one under the same names, and its metadata last. An interrupted
    save leaves data of two steps, which torch reads without an error. Only the times show it: data that is
    newer than the metadata, after a pause. A copy may have times in any order, but no pause.

    Args:
        earlier: Files that a save completes before it writes any of `later`.
        later: The other files.

    Raises:
        CheckpointError: The files were written in the wrong order, with a pause between.
    """
    with explained("read", later[-1]):
        end = max(path.stat().st_mtime for path in later)
        found = sorted((path.stat().st_mtime - end, path.stat().st_size, path) for path in earlier)
    late = [(age, size, path) for age, size, path in found if age > 0]
    previous = 0.0
    for number, (age, size, path) in enumerate(late):
        if age - previous > _PAUSE + size / _SLOWEST:
            raise CheckpointError(
                f"'{path.parent}' holds files of two saves: {_names(late[number:])} were written "
                f"{age - previous:.0f} seconds after the rest, by a save into the same directory that was "
                "interrupted.",
                remedy=f"Resume from another checkpoint. If you know that it is intact, `touch {later[-1]}`.",
            )
        previous = age
    if late:
        log.warning(
            "%s in %s is newer than %s: either a copy, or files of two saves.",
            _names(late),
            later[-1].parent,
            later[-1].name,
        )


def _names(late: Sequence[tuple[float, int, Path]]) -> str:
    return ", ".join(path.name for _, _, path in late[:4]) + (", ..." if len(late) > 4 else "")


class DcpDirectory(CheckpointFormat):
    """A directory of ``dcp.save``: ``.metadata`` and files of every rank, or safetensors files."""

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
                "%s lacks Lightning's meta.pt: step, schedulers and callbacks are lost.",
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

        The model is under ``model`` and the optimizer under ``optimizer``, both by parameter name, as in
        torch's ``get_state_dict``. Several optimizers are ``optimizer_0``, ``optimizer_1`` and so on. Other
        entries of Trainer and nnx are under ``trainer``.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            parameter_names: The names of parameters for each optimizer that only numbers them.
            **options: No other options exist.

        Raises:
            CheckpointError: An object cannot be pickled, or reading or writing failed.
        """
        self.refuse_options(options)
        described = Described(checkpoint)
        state, beside = items_to_write(described, parameter_names)
        with new_directory(path) as directory:
            write_dcp_files(directory, described, state, objects=(TRAINER, beside), progress=progress)


# Lightning's ModelParallelStrategy and FSDPStrategy write sharded directories, from Trainer and from Fabric:
# DCP directories with the other entries of Lightning's dict in ``meta.pt``.


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
                f"'{directory / _META}' holds a {type(meta).__name__}, expected a dict.",
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

        A checkpoint of Fabric is written for Fabric, under the keys that its user chose.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            strategy: The strategy that will read it, because each reads the model under another key.
            parameter_names: The names of parameters for each optimizer that only numbers them.
            **options: No other options exist.

        Raises:
            CheckpointError: An optimizer's parameters have no names, an object cannot be pickled, or reading
                or writing failed.
        """
        self.refuse_options(options)
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
