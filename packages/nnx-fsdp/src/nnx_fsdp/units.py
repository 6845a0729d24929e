"""Choose the units of a model, and say why.

Units are the outermost layers that repeat: layers of one class, side by side in a ModuleList, ModuleDict or
Sequential, with at least `min_num_params` parameters each. A unit gathers and frees all layers inside it,
experts in a block among them.

Every rank must call the units in one order. Conditionally executed layers (`by_choice`) and their submodules
are never units: they belong to the unit that holds them, or to the root. If ranks reach units in different
orders, `nnx_core.agree.collective_order.CollectiveOrder` raises an error, and `remedy_by_choice` names the
option.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from nnx_core.errors import OptionError
from nnx_core.view.modules import Layers

DEFAULT_MIN_NUM_PARAMS = 100_000
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """The units of a model except its root, children before parents.

    Attributes:
        units: The name and the module of each unit.
        reason: The reason for the choice, as one clause.
    """

    units: tuple[tuple[str, nn.Module], ...]
    reason: str

    @property
    def last(self) -> str | None:
        """The name of the last unit, if all units are layers of one container."""
        containers = {name.rpartition(".")[0] for name, _ in self.units}
        return self.units[-1][0] if len(containers) == 1 else None

    def reshards(self, name: str, given: bool | int | None) -> bool | int:
        """Return ``reshard_after_forward`` of a unit.

        Args:
            name: The name of the unit.
            given: The option's value. By default the last unit stays gathered: backward begins with it, so
                resharding it only adds a gather.
        """
        return name != self.last if given is None else given

    def describe(self, root: nn.Module) -> str:
        """Return the units and the reason for them, as one clause."""
        total = _count(root)
        if not self.units:
            return f"one unit of {total:,} parameters ({self.reason})"
        classes = Counter(type(module).__name__ for _, module in self.units)
        names = ", ".join(f"{count} x {name}" for name, count in classes.items())
        largest = max(_count(module) for _, module in self.units)
        number = f"{len(self.units)} units" if len(self.units) > 1 else "1 unit"
        return (
            f"{number} ({names}; the largest has {largest:,} parameters) and the root, {total:,} parameters "
            f"in all ({self.reason})"
        )


def choose_units(
    root: nn.Module,
    *,
    policy: object = None,
    min_num_params: int | None = None,
    by_choice: object = None,
) -> UnitChoice:
    """Choose the units under `root`.

    Args:
        root: The complete model, which is always the last unit.
        policy: A layer class or its name, several of them, or a function from module to bool; None finds
            repeated layers.
        min_num_params: The minimum number of parameters of a unit.
        by_choice: Conditionally executed modules, see `modules_by_choice`. They are never units.

    Raises:
        OptionError: The policy is of the wrong type or matches nothing, or `by_choice` names nothing.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))
        >>> [name for name, _ in choose_units(model).units]
        ['0', '1', '2']
    """
    left = modules_by_choice(root, by_choice)
    if policy is None:
        minimum = DEFAULT_MIN_NUM_PARAMS if min_num_params is None else min_num_params
        return _repeated_layers(root, minimum, left)
    minimum = min_num_params or 0
    if isinstance(policy, (str, type, list, tuple, set, frozenset)):
        layers = Layers(policy, option="auto_wrap_policy")
        layers.check(root)
        wanted: Callable[[nn.Module], bool] = layers.__contains__
        reason = f"auto_wrap_policy names {layers}"
    elif callable(policy):
        wanted, reason = policy, "auto_wrap_policy, a function, chose them"
    else:
        raise OptionError(
            f"auto_wrap_policy={policy!r} is of type {type(policy).__name__}.",
            remedy="Pass a layer class or its name, several, or a function from module to bool.",
        )
    choice = _matching(root, wanted, minimum, reason, left)
    if not choice.units and not left:
        raise OptionError(
            f"auto_wrap_policy matches no module of {type(root).__name__} with at least {minimum:,} "
            "parameters.",
            remedy="Check the layer classes, lower min_num_params, or leave the policy out.",
        )
    return choice


def modules_by_choice(root: nn.Module, by_choice: object) -> set[nn.Module]:
    """Find the conditionally executed modules, with all modules inside them.

    Args:
        root: The complete model.
        by_choice: Names of modules from `named_modules`, layer classes, or names of classes; one or several,
            or None for none.

    Raises:
        OptionError: A name matches no module and no class of a module, or an entry is neither.

    Example:
        >>> model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
        >>> len(modules_by_choice(model, ["experts"]))
        3
    """
    several = isinstance(by_choice, Iterable) and not isinstance(by_choice, (str, type))
    entries: list[object] = [] if by_choice is None else list(by_choice) if several else [by_choice]  # type: ignore[call-overload]
    named = dict(root.named_modules(remove_duplicate=False))
    by_name = [entry for entry in entries if isinstance(entry, str) and entry and entry in named]
    by_class = [entry for entry in entries if entry not in by_name]
    layers = Layers(by_class, option="by_choice")
    layers.check(root)
    chosen = [*(named[name] for name in by_name), *(module for module in root.modules() if module in layers)]
    return {inside for module in chosen if module is not root for inside in module.modules()}


def options_by_choice(root: nn.Module, units: Iterable[str]) -> dict[str, str]:
    """Return the `by_choice` entry for each unit that would keep it and its siblings from being units.

    The entry is the outermost container around the unit, or the unit itself without a container. In a root
    that is a container, the entry is the class of the unit.

    Args:
        root: The complete model.
        units: The names of the units.

    Example:
        >>> options_by_choice(nn.Sequential(nn.Linear(2, 2)), ["0"])
        {'0': 'Linear'}
    """
    return {name: _held_by(root, name) for name in units}


def _held_by(root: nn.Module, unit: str) -> str:
    held = unit
    while held:
        above = held.rpartition(".")[0]
        if not isinstance(root.get_submodule(above), _CONTAINERS):
            return held
        held = above
    return type(root.get_submodule(unit)).__name__


def remedy_by_choice(options: Mapping[str, str], message: str) -> str:
    """Return a remedy with the `by_choice` entries for the units that an error names; empty without any.

    Args:
        options: The result of `options_by_choice`.
        message: The error message of a `CollectiveOrder`.

    Example:
        >>> message = "rank 0 came to the gather of experts.0; rank 1 came to the gather of experts.1."
        >>> remedy_by_choice({"experts.0": "experts", "experts.1": "experts"}, message)
        'If the forward chooses between layers of experts, pass by_choice=["experts"].'
    """
    found = re.findall(r"(?:gather|reduction) of ([^\s;,']*[^\s;,'.])", message)
    names = dict.fromkeys(options[name] for name in found if name in options)
    if not names:
        return ""
    listed = ", ".join(f'"{name}"' for name in names)
    return f"If the forward chooses between layers of {' and '.join(names)}, pass by_choice=[{listed}]."


def _matching(
    root: nn.Module,
    wanted: Callable[[nn.Module], bool],
    minimum: int,
    reason: str,
    left: Collection[nn.Module],
) -> UnitChoice:
    units = [
        (name, module)
        for name, module in root.named_modules()
        if module is not root
        and not isinstance(module, _CONTAINERS)
        and module not in left
        and wanted(module)
        and _is_unit(module, minimum)
    ]
    return UnitChoice(_bottom_up(_without_tied(root, units)), reason)


def _repeated_layers(root: nn.Module, minimum: int, left: Collection[nn.Module]) -> UnitChoice:
    """Choose the outermost layers of one class that repeat side by side, without those in `left`."""
    repeated: list[tuple[str, nn.Module]] = []
    for name, container in root.named_modules():
        inside_a_unit = any(name.startswith(f"{unit}.") for unit, _ in repeated)
        if inside_a_unit or not isinstance(container, _CONTAINERS):
            continue
        by_class: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
        for child_name, child in container.named_children():
            by_class[type(child)].append((f"{name}.{child_name}" if name else child_name, child))
        for layers in by_class.values():
            if len(layers) > 1 and not isinstance(layers[0][1], _CONTAINERS):
                repeated += [layer for layer in layers if _is_unit(layer[1], minimum)]
    chosen = [unit for unit in repeated if unit[1] not in left]
    beside = "; layers of by_choice are no units" if left else ""
    untied = _without_tied(root, chosen)
    if untied:
        return UnitChoice(
            _bottom_up(untied),
            f"they repeat in a container and have at least {minimum:,} parameters each{beside}",
        )
    if chosen:
        return UnitChoice((), f"every repeated layer shares parameters with modules outside of it{beside}")
    return UnitChoice(
        (),
        f"not split: no layers of min_num_params={minimum:,} or more parameters repeat in a container"
        f"{beside}",
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
    """Return the names of parameters used both inside and outside of `unit`: it cannot gather them."""
    inside = {id(module) for module in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    return [
        f"{name}.{parameter_name}" if name else parameter_name
        for name, module in root.named_modules()
        if id(module) not in inside
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in own
    ]
