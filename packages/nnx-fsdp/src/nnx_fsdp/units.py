"""Which modules are sharded together: the choice of units, and the reason for it.

A unit is gathered and freed as one, so it should be one layer of a deep model: large enough to make its
collective worthwhile, small enough that one or two at a time fit beside the shards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from nnx_core.errors import OptionError
from nnx_core.layer_classes import as_classes
from nnx_fsdp.choices import called_by_choice

DEFAULT_MIN_NUM_PARAMS = 100_000
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """The units of a model beside its root, children before parents.

    Attributes:
        units: Name and module of each.
        reason: Why these, as one sentence.
    """

    units: tuple[tuple[str, nn.Module], ...]
    reason: str

    def describe(self, root: nn.Module) -> str:
        """What the units are and why, as one clause."""
        total = _count(root)
        if not self.units:
            return f"one unit of {total:,} parameters ({self.reason})"
        classes = Counter(type(module).__name__ for _, module in self.units)
        names = ", ".join(f"{count} x {name}" for name, count in classes.items())
        largest = max(_count(module) for _, module in self.units)
        return (
            f"{len(self.units)} units ({names}; the largest has {largest:,} parameters) and the "
            f"root, {total:,} parameters in all ({self.reason})"
        )


def choose_units(root: nn.Module, *, policy: object = None, min_num_params: int | None = None) -> UnitChoice:
    """Choose the modules under `root` to be sharded as units.

    Args:
        root: The whole model, which is always the last unit.
        policy: Layer class or classes, or a function from module to bool; None finds repeated layers.
        min_num_params: Smaller modules are left to the unit above them.

    Raises:
        OptionError: The policy is of the wrong type or matches nothing.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))
        >>> [name for name, _ in choose_units(model).units]
        ['0', '1', '2']
    """
    if policy is None:
        return _repeated_layers(root, DEFAULT_MIN_NUM_PARAMS if min_num_params is None else min_num_params)
    minimum = min_num_params or 0
    if isinstance(policy, (type, list, tuple, set, frozenset)):
        classes = as_classes(policy, option="auto_wrap_policy")
        names = ", ".join(cls.__name__ for cls in classes)
        choice = _matching(
            root, lambda module: isinstance(module, classes), minimum, f"auto_wrap_policy names {names}"
        )
    elif callable(policy):
        choice = _matching(root, policy, minimum, "auto_wrap_policy, a function, chose them")
    else:
        raise OptionError(
            f"auto_wrap_policy={policy!r} is of type {type(policy).__name__}.",
            remedy="Pass a layer class, several, or a function from module to bool.",
        )
    if not choice.units:
        raise OptionError(
            f"auto_wrap_policy matches no module of {type(root).__name__} with at least {minimum:,} "
            "parameters.",
            remedy="Check the layer classes, lower min_num_params, or leave the policy out.",
        )
    return choice


def _matching(root: nn.Module, wanted: Callable[[nn.Module], bool], minimum: int, reason: str) -> UnitChoice:
    units = [
        (name, module)
        for name, module in root.named_modules()
        if module is not root
        and not isinstance(module, _CONTAINERS)
        and wanted(module)
        and _is_unit(module, minimum)
    ]
    return UnitChoice(_bottom_up(_without_tied(root, units)), reason)


def _repeated_layers(root: nn.Module, minimum: int) -> UnitChoice:
    """Layers of one class that repeat inside a container: blocks of a transformer, stages of a CNN.

    Experts repeat as well, but a forward chooses between them: they are gathered with what is around them.
    """
    repeated: list[tuple[str, nn.Module]] = []
    by_choice = called_by_choice(root)
    left: list[tuple[str, nn.Module]] = []
    for name, container in root.named_modules():
        inside_a_unit = any(name.startswith(f"{unit}.") for unit, _ in repeated)
        if inside_a_unit or not isinstance(container, _CONTAINERS):
            continue
        by_class: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
        for child_name, child in container.named_children():
            by_class[type(child)].append((f"{name}.{child_name}" if name else child_name, child))
        for layers in by_class.values():
            large = [layer for layer in layers if _is_unit(layer[1], minimum)]
            if len(layers) > 1 and not isinstance(layers[0][1], _CONTAINERS):
                (left if container in by_choice else repeated).extend(large)
    untied = _without_tied(root, repeated)
    beside = f"; {left[0][0]} and {len(left) - 1} more are called by choice and are no units" if left else ""
    if untied:
        return UnitChoice(
            _bottom_up(untied),
            f"they repeat in a container and have at least {minimum:,} parameters each{beside}",
        )
    if repeated:
        return UnitChoice((), f"every repeated layer shares parameters with modules outside of it{beside}")
    if left:
        return UnitChoice((), f"its repeated layers, such as {left[0][0]}, are called by choice")
    return UnitChoice(
        (), f"no layers of at least {minimum:,} parameters, or min_num_params, repeat in a container"
    )


def _is_unit(module: nn.Module, minimum: int) -> bool:
    return _count(module) >= max(minimum, 1)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bottom_up(units: list[tuple[str, nn.Module]]) -> tuple[tuple[str, nn.Module], ...]:
    return tuple(sorted(units, key=lambda unit: -unit[0].count(".")))


def _without_tied(root: nn.Module, units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    return [unit for unit in units if not tied_across(root, unit[1])]


def tied_across(root: nn.Module, unit: nn.Module) -> list[str]:
    """Names of parameters that are used both inside and outside of `unit`: they cannot be in its group."""
    inside = {id(module) for module in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    return [
        f"{name}.{parameter_name}" if name else parameter_name
        for name, module in root.named_modules()
        if id(module) not in inside
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in own
    ]
