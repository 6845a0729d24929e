"""The model as the planner sees it: sizes of units, widths of the precision, and what a step keeps.

Sizes and the state of optimizers are counted, which runs nothing. What a step keeps is found by `probe`,
which runs the step without memory.
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
    """Dtypes of a precision.

    Attributes:
        working: The dtype of the weights that forward and backward compute with.
        master: The dtype of what the optimizer updates.
        mixed: True if the two differ, and autocast is on.
    """

    working: torch.dtype
    master: torch.dtype

    @property
    def mixed(self) -> bool:
        """True if there are masters beside the working weights."""
        return self.working != self.master


def widths(precision: str | int) -> Widths:
    """The dtypes of Lightning's precision string.

    Raises:
        OptionError: It is none that chunks know.

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
"""Tensors as large as the parameter that classes keep, whatever their options."""

_SWITCHES = {
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "SGD": ("momentum",),
    "RMSprop": ("momentum", "centered"),
}
"""Options that add one more each."""

_UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps.

    Attributes:
        tensors: The number of state tensors as large as the parameter, in its masters' dtype.
        note: A remark if that is a guess.
    """

    tensors: int
    note: str = ""


def optimizer_state(optimizer: Optimizer | type[Optimizer] | Iterable[Optimizer] | None) -> OptimizerMemory:
    """What an optimizer keeps for an element that it trains, from its class and its groups' options.

    Args:
        optimizer: One, several, or a class; None is taken for Adam.

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
    """The model as the planner sees it: one group for each unit.

    Sizes are those that are held: FSDP2 cuts the first dimension of each parameter into equal parts, and
    what it adds for that is counted.

    Args:
        units: Of the model; see `nnx_colossalai.plan.units.find_units`.
        world_size: Ranks over which masters and state are divided.
        precision: Lightning's precision string.
        optimizer: Instance, class or several; or bytes of state for each trained element. None is Adam.
        probe: The measurement of what the forward keeps and computes; without it activations are not counted.
        flops: Floating point operations per second of the device, for the time that units compute.
        other_device_bytes: The bytes that the device holds beside what is counted here; buffers and the
            largest temporary are.
        gradients_in_forward: See `ModelSpec`.

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
    """Bytes of a module's buffers, which are on the device all the time."""
    return sum(buffer.numel() * buffer.element_size() for buffer in root.buffers())


# Which layers cannot be chunks: others use their weights, or nobody could see that none does.
#
# Owns the rule that the plan of a run and a dry run share; what a step uses is `probe`'s.


def doubtful_units(
    module: nn.Module, found: Sequence[FoundUnit], *, policy: object, least: int | None, most: int | None
) -> dict[str, bool]:
    """Units whose weights other modules may use, and whether they lie beside the layers.

    Beside them are embeddings and heads; parts of layers are units because `most` asks for it.

    Args:
        module: The root.
        found: Its units.
        policy: See `find_units`, as are the next two; units that a policy chose are never in doubt.
        least: Smallest unit.
        most: Largest unit.

    Example:
        >>> from nnx_colossalai.plan.units import find_units
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> module = nn.ModuleDict({"embed": nn.Embedding(9, 8), "layers": layers})
        >>> doubtful_units(module, find_units(module, min_numel=9), policy=None, least=9, most=None)
        {'embed': True}
    """
    if policy is not None:
        return {}
    if least is None and most is not None:  # as for chunks
        least = min(most, DEFAULT_MIN_NUM_PARAMS)
    layers = choose_units(module, min_num_params=least).units
    names = {name for name, _ in layers} | {""}
    inside = tuple(f"{name}." for name, _ in layers)
    return {unit.name: not unit.name.startswith(inside) for unit in found if unit.name not in names}


def left_with_the_root(probe: Probe | None, doubtful: Mapping[str, bool]) -> list[str]:
    """Names of units that must be none.

    Args:
        probe: What a step was seen to use; with a note nothing was seen. None: nobody needed to look.
        doubtful: See `doubtful_units`.

    Example:
        >>> left_with_the_root(Probe(note="no inputs"), {"embed": True, "layers.0.up": False})
        ['embed']
        >>> left_with_the_root(Probe(used_outside=frozenset({"head"})), {"embed": True, "head": True})
        ['head']
    """
    if probe is None:
        return []
    if probe.note:
        return [name for name, is_beside in doubtful.items() if is_beside]
    return sorted(probe.used_outside)
