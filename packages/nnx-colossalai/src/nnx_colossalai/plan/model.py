"""Describe a model for the planner: sizes of units, dtypes of the precision, state and activations.

Sizes and optimizer state are counted without running anything. `probe` finds the activations by running a
step on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from nnx_colossalai.plan.kept import Probe
from nnx_colossalai.plan.spec import Group, ModelSpec
from nnx_colossalai.plan.units import FoundUnit, padded_numel
from nnx_core.errors import OptionError
from nnx_fsdp.units import DEFAULT_MIN_NUM_PARAMS, choose_units

_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_TRUE = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


class Widths(NamedTuple):
    """The dtypes of a precision.

    Attributes:
        working: The dtype of the weights that forward and backward compute with.
        master: The dtype of the masters that the optimizer updates.
        mixed: True if the two differ, and autocast is on.
    """

    working: torch.dtype
    master: torch.dtype

    @property
    def mixed(self) -> bool:
        """True if there are masters beside the working weights."""
        return self.working != self.master


def widths(precision: str | int) -> Widths:
    """Return the dtypes of Lightning's precision string.

    Raises:
        OptionError: Chunks do not support the precision.

    Example:
        >>> widths("bf16-mixed")
        Widths(working=torch.bfloat16, master=torch.float32)
        >>> widths("bf16-true").mixed
        False
    """
    name = _ALIASES.get(str(precision), str(precision))
    if name in _MIXED:
        return Widths(_MIXED[name], torch.float32)
    if name in _TRUE:
        return Widths(_TRUE[name], _TRUE[name])
    known = ", ".join(repr(one) for one in (*_TRUE, *_MIXED))
    raise OptionError(f"precision={precision!r} is unknown to chunks.", remedy=f"Use one of {known}.")


_TENSORS: dict[str, int] = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SparseAdam": 2, "Adadelta": 2, "Rprop": 2,
    "Adagrad": 1, "ASGD": 1, "RMSprop": 1, "Muon": 1, "Lion": 1, "SGD": 0, "Adafactor": 0,
}  # fmt: skip
"""The number of state tensors of a parameter's size that each class keeps with any options."""

_SWITCHES = {
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "SGD": ("momentum",),
    "RMSprop": ("momentum", "centered"),
}
"""The options that each add one more state tensor."""

_UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The state of an optimizer.

    Attributes:
        tensors: The number of state tensors of a parameter's size, in the masters' dtype.
        note: A note if the number is a guess.
    """

    tensors: int
    note: str = ""


def optimizer_state(optimizer: Optimizer | type[Optimizer] | Iterable[Optimizer] | None) -> OptimizerMemory:
    """Count the state tensors of an optimizer from its class and its groups' options.

    Args:
        optimizer: An optimizer, several, or a class; None counts as Adam.

    Example:
        >>> weights = [nn.Parameter(torch.ones(2))]
        >>> optimizer_state(torch.optim.SGD(weights, lr=0.1, momentum=0.9)).tensors
        1
        >>> optimizer_state(torch.optim.AdamW).tensors
        2
    """
    if optimizer is None:
        return OptimizerMemory(_UNKNOWN, "no optimizer is known yet: taken for Adam.")
    if isinstance(optimizer, type):
        return _of_class(optimizer, [{}])
    if isinstance(optimizer, Optimizer):
        return _of_class(type(optimizer), optimizer.param_groups)
    found = [optimizer_state(one) for one in optimizer]
    if not found:
        return optimizer_state(None)
    return max(found, key=lambda one: one.tensors)


def _of_class(cls: type[Optimizer], groups: Sequence[dict[str, Any]]) -> OptimizerMemory:
    name = next((base.__name__ for base in cls.__mro__ if base.__name__ in _TENSORS), None)
    if name is None:
        return OptimizerMemory(
            _UNKNOWN, f"the state of {cls.__name__} is not known: taken for as large as Adam's."
        )
    most = max(
        (sum(bool(group.get(switch)) for switch in _SWITCHES.get(name, ())) for group in groups), default=0
    )
    return OptimizerMemory(_TENSORS[name] + most)


def model_spec(
    units: Sequence[FoundUnit],
    *,
    world_size: int = 1,
    precision: str | int = "32-true",
    optimizer: Optimizer | type[Optimizer] | Iterable[Optimizer] | int | None = None,
    probe: Probe | None = None,
    flops: float | None = None,
    other_device_bytes: int = 0,
    gradients_in_forward: bool = True,
) -> ModelSpec:
    """Describe a model for the planner, with one group for each unit.

    Sizes include the padding that FSDP2 adds to split the first dim of each parameter into equal shards.

    Args:
        units: The units of the model; see `nnx_colossalai.plan.units.find_units`.
        world_size: The number of ranks that shard masters and state.
        precision: Lightning's precision string.
        optimizer: An optimizer, a class or several, or the bytes of state per trained element; None is Adam.
        probe: The measured activations and operations; without it activations are not counted.
        flops: The floating point operations per second of the device, for the compute time of units.
        other_device_bytes: The bytes on the device besides buffers, the largest temporary and this model.
        gradients_in_forward: The attribute of `ModelSpec`.

    Example:
        >>> from nnx_colossalai.plan.units import find_units
        >>> spec = model_spec(find_units(nn.Linear(3, 5)), precision="bf16-mixed", optimizer=torch.optim.SGD)
        >>> spec.groups[0].numel, spec.working_bytes, spec.master_bytes, spec.optimizer_bytes
        (20, 2, 4, 0)
    """
    kinds = widths(precision)
    per_element = optimizer if isinstance(optimizer, int) else _state_bytes(optimizer, kinds)
    root = units[-1].module
    return ModelSpec(
        groups=tuple(_group(unit, world_size, probe, flops) for unit in units),
        world_size=world_size,
        working_bytes=kinds.working.itemsize,
        master_bytes=kinds.master.itemsize,
        gradient_bytes=kinds.master.itemsize,
        optimizer_bytes=per_element,
        other_device_bytes=other_device_bytes + buffer_bytes(root) + (probe.temporary_bytes if probe else 0),
        gradients_in_forward=gradients_in_forward,
    )


def _state_bytes(optimizer: Optimizer | type[Optimizer] | Iterable[Optimizer] | None, kinds: Widths) -> int:
    return optimizer_state(optimizer).tensors * kinds.master.itemsize


def _group(unit: FoundUnit, world_size: int, probe: Probe | None, flops: float | None) -> Group:
    sizes = [(padded_numel(p, world_size), p.requires_grad) for p in unit.parameters.values()]
    computed = probe.flops.get(unit.name, 0) if probe and flops else 0
    return Group(
        name=unit.name,
        numel=sum(size for size, _ in sizes),
        trainable=sum(size for size, trained in sizes if trained),
        activation_bytes=probe.activation_bytes.get(unit.name, 0) if probe else 0,
        compute_seconds=computed / flops if flops else 0.0,
    )


def buffer_bytes(root: nn.Module) -> int:
    """Return the bytes of a module's buffers, which are always on the device."""
    return sum(buffer.numel() * buffer.element_size() for buffer in root.buffers())


def doubtful_units(
    module: nn.Module, found: Sequence[FoundUnit], *, policy: object, least: int | None, most: int | None
) -> dict[str, bool]:
    """Return the units whose weights other modules may use, with True for those outside of layers.

    Units outside of layers are embeddings and heads. Units inside of layers were split off because of `most`.
    `probe` finds the uses of a step. The plan of a run and a dry run share this rule.

    Args:
        module: The root.
        found: The units of the model.
        policy: The policy of `find_units`; a unit that a policy chose is never doubtful.
        least: The smallest unit.
        most: The largest unit.

    Example:
        >>> from nnx_colossalai.plan.units import find_units
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> module = nn.ModuleDict({"embed": nn.Embedding(9, 8), "layers": layers})
        >>> doubtful_units(module, find_units(module, min_numel=9), policy=None, least=9, most=None)
        {'embed': True}
    """
    if policy is not None:
        return {}
    # The same default as in `find_units`.
    if least is None and most is not None:
        least = min(most, DEFAULT_MIN_NUM_PARAMS)
    layers = choose_units(module, min_num_params=least).units
    names = {name for name, _ in layers} | {""}
    inside = tuple(f"{name}." for name, _ in layers)
    return {unit.name: not unit.name.startswith(inside) for unit in found if unit.name not in names}


def left_with_the_root(probe: Probe | None, doubtful: Mapping[str, bool]) -> list[str]:
    """Return the names of units that must stay with the root, because other modules may use their weights.

    Args:
        probe: The uses that a step showed; with a note there are none, and None means that no probe ran.
        doubtful: The result of `doubtful_units`.

    Example:
        >>> left_with_the_root(Probe(note="no inputs"), {"embed": True, "layers.0.up": False})
        ['embed']
        >>> left_with_the_root(Probe(used_outside=frozenset({"head"})), {"embed": True, "head": True})
        ['head']
    """
    if probe is None:
        return []
    # The step could not run: leave out embeddings and heads, whose weights are tied most often.
    if probe.note:
        return [name for name, is_beside in doubtful.items() if is_beside]
    return sorted(probe.used_outside)
