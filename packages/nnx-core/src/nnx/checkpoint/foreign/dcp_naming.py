"""Giving the parts of a DCP directory their logical names, and taking back what we left beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.checkpoint.foreign.contents import Contents, Lifted, unpack
from nnx.checkpoint.foreign.dcp_files import LocatedTensor
from nnx.checkpoint.foreign.dcp_layouts import Parts
from nnx.checkpoint.foreign.torch_file import map_paths
from nnx.checkpoint.views import FABRIC_KEYS

__all__ = ["OURS", "TRAINER", "add_parts", "is_ours", "restore_ours"]

OURS = "nnx"
"""Under which key of the trainer's objects stands what DCP and Lightning have no place for."""
TRAINER = "trainer"
"""Under which key our own DCP directories keep the trainer's objects."""
_STATE, _GROUPS = "state", "param_groups"
_OBJECT_KEYS = {_STATE: "values", _GROUPS: "groups"}
"""What these are called among the objects of a checkpoint."""


def add_parts(contents: Contents, parts: Parts, beside: Mapping[str, Any]) -> None:
    """Add everything under its logical names. Names of one place in the files are tied.

    Args:
        contents: Of the checkpoint.
        parts: The state dict, taken apart.
        beside: Objects of the trainer that lie beside it.
    """
    stored: dict[Any, str] = {}
    for key, prefix in parts.prefixes.items():
        extra = {}
        for name, value in parts.models[key].items():
            logical = f"model.{prefix}{name}"
            if not isinstance(value, LocatedTensor):
                extra[f"{prefix}{name}"] = value
            elif value.pieces and value.pieces in stored:
                contents.aliases[logical] = stored[value.pieces]
            else:
                stored[value.pieces] = logical
                _add_tensor(contents, logical, value)
        contents.add_model(_lifted(contents, extra, "objects.extra"))
    for state in parts.optimizers.values():
        _add_optimizer(contents, _named(state, parts))
    contents.set_trainer({**_lifted(contents, parts.rest, "objects.trainer"), **beside})


def _add_tensor(contents: Contents, name: str, tensor: LocatedTensor) -> None:
    if tensor.resident is not None:
        contents.add(name, tensor.resident)
    else:
        contents.add_pieces(name, tensor.shape, tensor.dtype_name, tensor.pieces)


def _add_optimizer(contents: Contents, state: Mapping[str, Any]) -> None:
    index = len(contents.objects.get("optim", ()))
    values: dict[Any, dict[str, Any]] = {}
    for parameter, entries in state[_STATE].items():
        for name, value in entries.items():
            if isinstance(value, LocatedTensor):
                _add_tensor(contents, f"optim.{index}.state.{parameter}.{name}", value)
            else:
                values.setdefault(parameter, {})[name] = value
    described = {
        key: _lifted(contents, value, f"objects.optim.{index}.{_OBJECT_KEYS.get(key, f'other.{key}')}")
        for key, value in {**state, _STATE: values}.items()
    }
    contents.add_optimizer(described)


def _named(state: Mapping[str, Any], parts: Parts) -> Mapping[str, Any]:
    """An optimizer's state by logical names, as far as they are known, and without ``param_names``.

    These replace numbers where they are names of a model. Where there are several models, the key of the one
    that the parameters belong to comes before their names, unless they could belong to several.
    """
    order = [name for group in state[_GROUPS] for name in group["params"]]
    given = [name for group in state[_GROUPS] for name in group.get("param_names", ())]
    numbered = any(isinstance(name, int) for name in order)
    known = given if numbered and len(given) == len(order) else order
    owners = [key for key, model in parts.models.items() if order and set(known) <= set(model)]
    logical = {name: name for name in order}
    if len(owners) == 1:
        prefix = parts.prefixes[owners[0]]
        logical = {old: f"{prefix}{new}" for old, new in zip(order, known, strict=True)}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [logical[name] for name in group["params"]],
        }
        for group in state[_GROUPS]
    ]
    renamed = {logical.get(name, name): entries for name, entries in state[_STATE].items()}
    return {**state, _STATE: renamed, _GROUPS: groups}


def restore_ours(contents: Contents, beside: dict[str, Any]) -> dict[str, Any] | None:
    """Take out of the trainer's objects what `nnx.checkpoint.foreign.dcp_writing` put there.

    Args:
        contents: Where it belongs.
        beside: The objects, which lose it.

    Returns:
        World size and provenance of what was written; None if another program wrote this.
    """
    ours = beside.pop(OURS) if is_ours(beside) else None
    if ours is None:
        return None
    for name, tensor in ours["tensors"].items():
        contents.add(name, tensor)
    for key in ours["added"]:
        beside.pop(key, None)
    if ours["fabric"]:
        beside[FABRIC_KEYS] = ours["fabric"]
    return unpack(ours["left"], contents, Lifted, source=str(contents.path))


def is_ours(objects: Any) -> bool:
    """Whether nnx wrote these objects of a trainer."""
    ours = objects.get(OURS) if isinstance(objects, dict) else None
    return isinstance(ours, dict) and set(ours) >= {"left", "tensors", "added", "fabric"}


def _lifted(contents: Contents, tree: Any, prefix: str) -> Any:
    """Name the tensors of a tree by where they stand, and put `Lifted` in their places."""

    def lift(path: tuple[str, ...], value: Any) -> Any:
        if not isinstance(value, LocatedTensor):
            return value
        name = ".".join((prefix, *path))
        while name in contents.entries:
            name += "_"
        _add_tensor(contents, name, value)
        return Lifted(name)

    return map_paths(tree, lift)
