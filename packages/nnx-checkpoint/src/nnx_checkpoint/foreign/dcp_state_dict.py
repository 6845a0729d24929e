"""Translate between the flat names of a DCP directory and logical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import IN_FILES, Contents, Lifted
from nnx_checkpoint.foreign.extras import unpack
from nnx_checkpoint.reading.naming import (
    FABRIC_KEYS,
)

STATE, GROUPS = "state", "param_groups"


@dataclass(slots=True)
class Parts:
    """A split state dict.

    Attributes:
        models: State dicts by key, with tensors still in the files; other values are extra state.
        optimizers: ``{"state", "param_groups"}`` by key, named or numbered.
        rest: All other entries.
    """

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, list[str]]:
        """The keys of models and optimizers, by which users of Fabric look them up."""
        return {"modules": list(self.models), "optimizers": list(self.optimizers)}

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefix of a parameter's logical name: empty, or a model's key if there are several."""
        return {key: f"{key}." if len(self.models) > 1 else "" for key in self.models}


class _Node(dict["str | int", Any]):
    """A container of the state dict, as opposed to a dict that was saved as one object."""


def nest(values: Mapping[str, Any], keys: Mapping[str, Sequence[str | int]]) -> dict[str, Any]:
    """Return the saved state dict, nested.

    Args:
        values: The values by flat name.
        keys: The path (keys and list positions) of each value.

    Raises:
        CheckpointError: Two values claim the same place.

    Example:
        >>> nest({"a.b": 1, "c.0": 2}, {"a.b": ("a", "b"), "c.0": ("c", 0)})
        {'a': {'b': 1}, 'c': [2]}
    """
    root = _Node()
    for name, value in values.items():
        *parents, last = keys[name]
        node: Any = root
        for key in parents:
            node = node.setdefault(key, _Node()) if isinstance(node, _Node) else None
        if not isinstance(node, _Node) or last in node:
            raise CheckpointError(
                f"the metadata puts '{name}' at a path with another value: {list(keys[name])}.",
                remedy="The metadata is damaged; resume from another checkpoint.",
            )
        node[last] = value
    return {str(key): _plain(value) for key, value in root.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_plain(item) for _, item in sorted(value.items())]
    return {str(key): _plain(item) for key, item in value.items()}


def is_flattened(value: Mapping[str, Any]) -> bool:
    """Return True for a result of torch's ``flatten_optimizer_state_dict``."""
    of_groups = [key.startswith(f"{GROUPS}.") for key in value]
    return any(of_groups) and all(
        is_one or key.startswith(f"{STATE}.") for is_one, key in zip(of_groups, value, strict=True)
    )


def _optimizer(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in torch's own form (with parameter numbers if its groups have numbers)."""
    value = _unflattened(value) if is_flattened(value) else value
    groups = [dict(group) for group in value[GROUPS]]
    state = value.get(STATE, {})
    if not isinstance(state, dict) or not all(isinstance(entries, dict) for entries in state.values()):
        raise CheckpointError(
            "an optimizer's state in the checkpoint does not map parameters to their entries.",
            remedy="Save the result of `Optimizer.state_dict()` or torch's `get_optimizer_state_dict`.",
        )
    if any(isinstance(number, int) for group in groups for number in group["params"]):
        state = {int(number): entries for number, entries in state.items()}
    return {**value, STATE: state, GROUPS: groups}


def _unflattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``flatten_optimizer_state_dict`` (parameters with equal hyper-parameters form a group)."""
    hyper: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        if key.startswith(f"{GROUPS}."):
            parameter, _, name = key.removeprefix(f"{GROUPS}.").rpartition(".")
            hyper.setdefault(parameter, {})[name] = item.read() if isinstance(item, IN_FILES) else item
    groups: dict[str, dict[str, Any]] = {}
    for parameter, values in hyper.items():
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        group["params"].append(parameter)
    state: dict[str, Any] = {}
    for key, item in value.items():
        if key.startswith(f"{STATE}."):
            parameter, name = _split(key.removeprefix(f"{STATE}."), hyper)
            state.setdefault(parameter, {})[name] = item
    return {STATE: state, GROUPS: list(groups.values())}


def _split(key: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    parameter, _, name = key.rpartition(".")
    while parameter and parameter not in parameters:
        parameter, _, more = parameter.rpartition(".")
        name = f"{more}.{name}"
    if not parameter:
        raise CheckpointError(
            f"the optimizer's entry '{key}' belongs to no parameter in its groups.",
            remedy="It was saved by another program, or is damaged; resume from another checkpoint.",
        )
    return parameter, name


OURS = "nnx"
"""Key in the trainer's objects for entries that DCP and Lightning cannot store."""


TRAINER = "trainer"
"""Key of the trainer's objects in our own DCP directories."""


ParameterNames = Sequence[Sequence[str]]
"""For each optimizer, the name of parameter 0, 1, ..."""


def add_parts(contents: Contents, parts: Parts, beside: Mapping[str, Any]) -> None:
    """Add all entries under their logical names. Names with the same position in a file are tied.

    Args:
        contents: The contents of the checkpoint.
        parts: The state dict, split.
        beside: Objects of the trainer that are stored beside it.
    """
    for key, prefix in parts.prefixes.items():
        contents.add_model({f"{prefix}{name}": value for name, value in parts.models[key].items()})
    for state in parts.optimizers.values():
        contents.add_optimizer(state, _logical_names(state, parts))
    contents.set_trainer({**parts.rest, **beside})


def _logical_names(state: Mapping[str, Any], parts: Parts) -> dict[Any, str]:
    """Return the names of an optimizer's parameters, as far as they are known.

    ``param_names`` count if they are names of a model and the parameters have numbers. With several models,
    the key of the parameters' model precedes their names, unless they could belong to several models.
    """
    order = [name for group in state[GROUPS] for name in group["params"]]
    given = [name for group in state[GROUPS] for name in group.get("param_names", ())]
    numbered = any(isinstance(name, int) for name in order)
    known = given if numbered and len(given) == len(order) else order
    owners = [key for key, model in parts.models.items() if order and set(known) <= set(model)]
    if len(owners) != 1:
        return {}
    return {old: f"{parts.prefixes[owners[0]]}{new}" for old, new in zip(order, known, strict=True)}


def restore_ours(contents: Contents, beside: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the entries of `state_to_write` from the trainer's objects, and add them to the contents.

    Args:
        contents: The contents of the checkpoint.
        beside: The trainer's objects, which are changed.

    Returns:
        World size and provenance of the save; None if another program wrote it.
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
    """Return True if nnx wrote these objects of a trainer."""
    ours = objects.get(OURS) if isinstance(objects, dict) else None
    return isinstance(ours, dict) and set(ours) >= {"left", "tensors", "added", "fabric"}
