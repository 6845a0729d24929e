"""From the flat names of a directory of DCP to logical names, and back."""

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
    """A state dict, taken apart.

    Attributes:
        models: State dicts by key; tensors are still in the files, anything else is extra state.
        optimizers: ``{"state", "param_groups"}`` by key, named or numbered.
        rest: Everything else.
    """

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, list[str]]:
        """The keys of models and optimizers, for Fabric's users, who look them up by these."""
        return {"modules": list(self.models), "optimizers": list(self.optimizers)}

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefix of a parameter's logical name: empty, or a model's key if there are several."""
        return {key: f"{key}." if len(self.models) > 1 else "" for key in self.models}


class _Node(dict["str | int", Any]):
    """A container of the state dict, as opposed to a dict that was saved as one object."""


def nest(values: Mapping[str, Any], keys: Mapping[str, Sequence[str | int]]) -> dict[str, Any]:
    """Build the state dict that was saved.

    Args:
        values: The values by flat name.
        keys: The keys and list positions that lead to each.

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
                f"the metadata puts '{name}' where something else is: {list(keys[name])}.",
                remedy="It is damaged; resume from another checkpoint.",
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
    """Return True if it is what torch's ``flatten_optimizer_state_dict`` makes of an optimizer's state."""
    of_groups = [key.startswith(f"{GROUPS}.") for key in value]
    return any(of_groups) and all(
        is_one or key.startswith(f"{STATE}.") for is_one, key in zip(of_groups, value, strict=True)
    )


def _optimizer(value: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state in torch's own form, with numbers where its groups have numbers."""
    value = _unflattened(value) if is_flattened(value) else value
    groups = [dict(group) for group in value[GROUPS]]
    state = value.get(STATE, {})
    if not isinstance(state, dict) or not all(isinstance(entries, dict) for entries in state.values()):
        raise CheckpointError(
            "an optimizer's state in the checkpoint does not map parameters to their entries.",
            remedy="Save what `Optimizer.state_dict()` or torch's `get_optimizer_state_dict` returns.",
        )
    if any(isinstance(number, int) for group in groups for number in group["params"]):
        state = {int(number): entries for number, entries in state.items()}
    return {**value, STATE: state, GROUPS: groups}


def _unflattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``flatten_optimizer_state_dict``; parameters with equal hyper-parameters make up a group."""
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
            f"the optimizer's entry '{key}' belongs to none of the parameters in its groups.",
            remedy="It was saved by another program, or is damaged; resume from another checkpoint.",
        )
    return parameter, name


OURS = "nnx"
"""Under which key of the trainer's objects stands what DCP and Lightning have no place for."""


TRAINER = "trainer"
"""Under which key our own DCP directories keep the trainer's objects."""


ParameterNames = Sequence[Sequence[str]]
"""For each optimizer, the name of parameter 0, 1, ..."""


def add_parts(contents: Contents, parts: Parts, beside: Mapping[str, Any]) -> None:
    """Add everything under its logical name. Names of one place in the files are tied.

    Args:
        contents: The contents of the checkpoint.
        parts: The state dict, taken apart.
        beside: Objects of the trainer that lie beside it.
    """
    for key, prefix in parts.prefixes.items():
        contents.add_model({f"{prefix}{name}": value for name, value in parts.models[key].items()})
    for state in parts.optimizers.values():
        contents.add_optimizer(state, _logical_names(state, parts))
    contents.set_trainer({**parts.rest, **beside})


def _logical_names(state: Mapping[str, Any], parts: Parts) -> dict[Any, str]:
    """Return the names of an optimizer's parameters, as far as they are known.

    ``param_names`` count where they are names of a model and the parameters have numbers. Where there are
    several models, the key of the one that the parameters belong to comes before their names, unless they
    could belong to several.
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
    """Take out of the trainer's objects what `state_to_write` put there.

    Args:
        contents: The contents that it belongs to.
        beside: The objects, which lose it.

    Returns:
        Return world size and provenance of the save; None if another program wrote it.
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
