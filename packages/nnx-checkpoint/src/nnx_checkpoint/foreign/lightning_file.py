"""Read and write Lightning's single file, and read other files of ``torch.save``.

Reading accepts files of Trainer and Fabric, a plain state dict, and dicts such as
``{"model": ..., "optimizer": ..., "epoch": ...}``. Writing makes a file that stock Lightning resumes from,
with a few megabytes of memory. Parameter names of optimizers, and other entries without a field in
Lightning's dict, go under the key ``"nnx"``, which Lightning ignores.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, Lifted
from nnx_checkpoint.foreign.extras import pack, unpack
from nnx_checkpoint.foreign.torch_archive import write_torch_file
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import (
    FABRIC_KEYS,
    Described,
    StoredName,
    numbered_optimizer_state,
    stored_objects,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_file
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file, map_tree

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number at the start of files of torch before 1.6."""
_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_OURS = "nnx"
_RAW = "state_dict"
"""The key for a state dict that Lite saved alone, without a key."""
_VERSION_KEY = "pytorch-lightning_version"
_REQUIRED: dict[str, Any] = {_VERSION_KEY: None, "lr_schedulers": [], "epoch": 0, "global_step": 0}
"""The entries that Trainer needs to resume."""


class LightningFile(CheckpointFormat):
    """One file of ``torch.save``.

    The model is the entry ``state_dict``, else the first of ``model_state_dict``, ``model`` and ``module``
    that is a dict of tensors, else the file itself if it is such a dict. The optimizers are the list
    ``optimizer_states``, else every entry with ``state`` and ``param_groups``, in order. All other entries
    belong to the trainer.
    """

    name = "lightning"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        if not os.path.isfile(path):  # noqa: PTH113 - `path` may be a URL
            return False
        with open(path, "rb") as file:  # noqa: PTH123
            start = file.read(len(_LEGACY))
        return start.startswith(_ZIP) or start == _LEGACY

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        loaded = load_torch_file(Path(path), weights_only=weights_only)
        if isinstance(loaded, nn.Module):
            loaded = {"state_dict": loaded}
        if not isinstance(loaded, Mapping):
            raise CheckpointError(
                f"'{path}' holds a {type(loaded).__name__}, expected a dict with the state of a model.",
                remedy="Save `model.state_dict()` or a Lightning checkpoint instead.",
            )
        try:
            return _interpret(Contents(path, self.name), dict(loaded))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"'{path}' contradicts itself: {type(error).__name__}: {error}.",
                remedy="Restore it from a backup, or use another checkpoint.",
            ) from error

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        **options: Any,
    ) -> None:
        """Write a file that Trainer and Fabric resume from.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            **options: No options exist.

        Raises:
            CheckpointError: An object cannot be pickled, or reading or writing failed.
        """
        self.refuse_options(options)
        _know_attribute_dict()
        described = Described(checkpoint)
        tree = lightning_dict(described)
        with new_file(path) as temporary:
            write_torch_file(temporary, tree, described, name=Path(path).stem, progress=progress)


def _interpret(contents: Contents, rest: dict[str, Any]) -> ForeignCheckpoint:
    ours = rest.pop(_OURS, None) if _is_ours(rest.get(_OURS)) else None
    origin: dict[str, Any] = {"provenance": {"format": contents.format}}
    if _VERSION_KEY in rest:
        origin["provenance"]["lightning"] = rest[_VERSION_KEY]
    if ours is not None:
        origin = _restore_leftovers(contents, rest, ours)
    _add_model(contents, rest)
    _add_optimizers(contents, rest, ours)
    contents.set_trainer(rest)
    return contents.opened(**origin)


def _is_ours(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) >= {"left", "tensors", "parameter_names"}


def _restore_leftovers(contents: Contents, rest: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Undo the changes of `lightning_dict` to Fabric's keys and required entries."""
    for name, value in ours["tensors"].items():
        contents.add(name, value)
    for key in ours["added"]:
        rest.pop(key, None)
    keys = ours["fabric"]
    if keys is not None:
        models = {key: rest.pop(key or _RAW) for key in keys["modules"]}
        if models:
            rest["state_dict"] = {
                f"{prefix}{name}": value
                for key, prefix in _prefixes(keys).items()
                for name, value in models[key].items()
            }
        if keys["optimizers"]:
            rest["optimizer_states"] = [rest.pop(key) for key in keys["optimizers"]]
        rest[FABRIC_KEYS] = keys
    return unpack(ours["left"], contents, Lifted, source=str(contents.path))


def _prefixes(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the prefix of each module's names: its key if Fabric saved several modules, or Lite's record."""
    modules: list[str] = keys["modules"]
    stated: dict[str, str] = keys.get("prefixes", {})
    return stated or {key: "" if len(modules) == 1 else f"{key}." for key in modules}


def _add_model(contents: Contents, rest: dict[str, Any]) -> None:
    for candidate in _MODEL_KEYS:
        if isinstance(rest.get(candidate), nn.Module):  # only with ``weights_only=False``
            rest[candidate] = rest[candidate].state_dict()
    key = next((key for key in _MODEL_KEYS if _is_state_dict(rest.get(key))), None)
    if isinstance(rest.get("state_dict"), Mapping):
        key = "state_dict"
    if key is not None:
        contents.add_model(rest.pop(key))
    elif _is_state_dict(rest):
        contents.add_model(rest)
        rest.clear()


def _is_state_dict(value: Any) -> bool:
    """Return True for a dict of names to tensors, and optionally to results of `get_extra_state`."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = sum(isinstance(item, (FileTensor, Tensor)) for item in value.values())
    extra = sum(name.rpartition(".")[2] == "_extra_state" for name in value)
    return tensors > 0 and tensors + extra >= len(value)


def _add_optimizers(contents: Contents, rest: dict[str, Any], ours: Mapping[str, Any] | None) -> None:
    listed = rest.get("optimizer_states")
    if isinstance(listed, (list, tuple)) and all(_is_optimizer_state(state) for state in listed):
        states = rest.pop("optimizer_states")
        contents.objects["optim"] = []
    else:
        keys = [key for key, value in rest.items() if _is_optimizer_state(value)]
        states = [rest.pop(key) for key in keys]
    names = [None] * len(states) if ours is None else ours["parameter_names"]
    for state, known in zip(states, names, strict=True):
        contents.add_optimizer(state, known)


def _is_optimizer_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and "params" in group for group in groups
    )


def lightning_dict(checkpoint: Described) -> dict[str, Any]:
    """Return a checkpoint as Lightning's dict, with a `StoredName` for every tensor."""
    trainer, extra = dict(stored_objects(checkpoint, "trainer")), stored_objects(checkpoint, "extra")
    states = stored_optimizer_states(checkpoint)
    objects = {key: value for key, value in checkpoint.objects.items() if key not in ("trainer", "extra")}
    model = _state_dict(checkpoint, extra if "extra" in checkpoint.objects else None)
    others = [described.get("other", {}) for described in objects.pop("optim", None) or ()]
    optimizers = None
    if states is not None:
        numbered = [numbered_optimizer_state(state) for state in states]
        optimizers = [{**state, **other} for state, other in zip(numbered, others, strict=True)]
    keys = trainer.pop(FABRIC_KEYS, None)
    tree = _by_fabric(trainer, keys, model, optimizers) if keys else _by_trainer(trainer, model, optimizers)
    added = [] if keys else [key for key in _REQUIRED if key in tree and key not in trainer]
    used = _names_in(tree)
    aliases = {alias: name for alias, name in checkpoint.aliases.items() if not alias.startswith("model.")}
    tree[_OURS] = {
        "left": pack(checkpoint, objects, aliases),
        "tensors": {name: StoredName(checkpoint, name) for name in checkpoint.tensors if name not in used},
        "parameter_names": [_parameter_names(state) for state in states or ()],
        "added": added,
        "fabric": keys,
    }
    return tree


def _state_dict(checkpoint: Checkpoint, extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the model's tensors by name; None if the checkpoint has no model."""
    names = [name for name in (*checkpoint.tensors, *checkpoint.aliases) if name.startswith("model.")]
    if not names and extra is None:
        return None
    return {**{name.removeprefix("model."): StoredName(checkpoint, name) for name in names}, **(extra or {})}


def _by_trainer(trainer: dict[str, Any], model: Any, optimizers: list[Any] | None) -> dict[str, Any]:
    """Return the dict of Trainer, with required entries added if missing."""
    tree = dict(trainer)
    if model is not None:
        tree["state_dict"] = model
        tree.setdefault(_VERSION_KEY, _lightning_version())
    if optimizers is not None:
        tree["optimizer_states"] = optimizers
        for key, value in _REQUIRED.items():
            tree.setdefault(key, value)
    return tree


def _by_fabric(
    trainer: dict[str, Any],
    keys: Mapping[str, Any],
    model: dict[str, Any] | None,
    optimizers: list[Any] | None,
) -> dict[str, Any]:
    """Return the dict of Fabric, under the keys that the user chose."""
    model = model or {}
    modules = {
        key or _RAW: {
            name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)
        }
        for key, prefix in _prefixes(keys).items()
    }
    return {**trainer, **modules, **dict(zip(keys["optimizers"], optimizers or (), strict=True))}


def _names_in(tree: Any) -> set[str]:
    names: set[str] = set()

    def note(value: Any) -> Any:
        if isinstance(value, StoredName):
            names.add(value.stored.entry(value.key).name)
        return value

    map_tree(tree, note)
    return names


def _parameter_names(state: Mapping[str, Any]) -> list[str] | None:
    """Return the names of parameters 0, 1, ...; None if they have only numbers."""
    names = list(dict.fromkeys(name for group in state["param_groups"] for name in group["params"]))
    return names if all(isinstance(name, str) for name in names) else None


def _lightning_version() -> str:
    for distribution in ("lightning", "pytorch-lightning"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise CheckpointError("Lightning is not installed.", remedy="Run `pip install lightning`.")


def _know_attribute_dict() -> None:
    """Import the class of Lightning's dict with attributes, because decoding never imports it."""
    importlib.import_module("lightning.fabric.utilities.data")
