"""Choose the modules that become chunks, and the parameters of each.

Each layer is one unit, exactly as large as its parameters. Large modules outside of the layers, such as
embeddings and heads, are units too. Small modules stay with the unit above them, in the end with the root.
No module is changed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from nnx_core.errors import OptionError
from nnx_fsdp.units import DEFAULT_MIN_NUM_PARAMS, choose_units, modules_by_choice

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_DIVISIBLE = (*_LISTS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""torch's classes that call their children; its other classes use the children's weights directly."""


class FoundUnit(NamedTuple):
    """A module whose parameters become one chunk.

    Attributes:
        name: The full name of the module; ``""`` for the root.
        module: The module.
        parameters: The parameters that are in no inner unit, by full name.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return _count(self.parameters.values())

    @property
    def trainable(self) -> int:
        """The number of elements that require gradients."""
        return _count(p for p in self.parameters.values() if p.requires_grad)


def find_units(
    root: nn.Module,
    *,
    policy: object = None,
    min_numel: int | None = None,
    max_numel: int | None = None,
    leave: Collection[str] = (),
    by_choice: object = None,
) -> tuple[FoundUnit, ...]:
    """Choose the units of a model, in the order of definition; the root is always the last.

    A tied parameter is in the innermost unit that contains all its modules. So no unit shares a parameter
    with a module outside of it, as FSDP2 requires.

    Args:
        root: The complete model; parameters may be on the meta device.
        policy: A layer class or several, or a function from module to bool, which alone decides. None finds
            layers that repeat, and large modules beside them.
        min_numel: The smallest unit in elements; smaller modules stay with the unit above them. By default
            100,000 or `max_numel`, whichever is less; 0 with a policy.
        max_numel: The largest unit in elements; larger units are split into the modules that they call.
        leave: Names of modules that must not be units, nor contain any, because other modules use their
            weights.
        by_choice: The conditionally executed modules: see `nnx_fsdp.units.modules_by_choice`.

    Raises:
        OptionError: The policy is of the wrong type or matches nothing, or the bounds contradict each other.

    Example:
        >>> model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 2))
        >>> [(unit.name, unit.numel) for unit in find_units(model)]
        [('0', 160400), ('2', 160400), ('', 802)]
    """
    least = _least(min_numel, max_numel, policy)
    tree = _Tree(root, left=leave, by_choice=modules_by_choice(root, by_choice))
    choice = choose_units(root, policy=policy, min_num_params=least, by_choice=by_choice)
    chosen = [module for _, module in choice.units]
    units = {tree.name_of(module): module for module in chosen if tree.can_be_unit(module)}
    if policy is None:
        units |= _large_parts(tree, root, units, least)
    if max_numel is not None:
        units = _divided(tree, units, least, max_numel)
    return _with_parameters(tree, units)


def _least(min_numel: int | None, max_numel: int | None, policy: object) -> int:
    if max_numel is not None and max_numel < 1:
        raise OptionError(f"max_numel={max_numel} leaves no room for a parameter.", remedy="Pass at least 1.")
    if min_numel is None:
        return 0 if policy is not None else min(DEFAULT_MIN_NUM_PARAMS, max_numel or DEFAULT_MIN_NUM_PARAMS)
    if max_numel is not None and min_numel > max_numel:
        raise OptionError(
            f"min_numel={min_numel:,} is more than max_numel={max_numel:,}.",
            remedy="Let the smallest chunk be no larger than the largest.",
        )
    return min_numel


class _Tree:
    """The modules that hold each parameter, under all their names.

    Args:
        root: The model.
        left: Names of modules that must not be units, nor contain any.
        by_choice: Modules that must not be units, because other ranks may not call them in the same step.
    """

    def __init__(self, root: nn.Module, *, left: Collection[str], by_choice: Collection[nn.Module]) -> None:
        self.root = root
        self.names: dict[int, list[str]] = defaultdict(list)
        self._users: dict[int, list[str]] = defaultdict(list)
        for name, module in root.named_modules(remove_duplicate=False):
            self.names[id(module)].append(name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._users[id(parameter)].append(name)
        self._excluded = {id(inner) for name in left for inner in root.get_submodule(name).modules()}
        self._excluded |= set(map(id, by_choice))

    def name_of(self, module: nn.Module) -> str:
        """Return the first name of a module, which may have several."""
        return self.names[id(module)][0]

    def can_be_unit(self, module: nn.Module) -> bool:
        """Return True if it is called, has parameters, and shares none with modules outside of it."""
        if module is self.root or id(module) in self._excluded or not _has_forward(module):
            return False
        inside = self.names[id(module)]
        parameters = list(module.parameters())
        return bool(parameters) and all(
            any(_is_below(user, name) for name in inside) for p in parameters for user in self._users[id(p)]
        )


def _large_parts(
    tree: _Tree, module: nn.Module, units: Mapping[str, nn.Module], least: int
) -> dict[str, nn.Module]:
    """Return the innermost modules outside of the units that are large enough to be units."""
    found: dict[str, nn.Module] = {}
    for child in module.children():
        name = tree.name_of(child)
        if name in units:
            continue
        if _calls_children(child) or any(_is_below(unit, name) for unit in units):
            found |= _large_parts(tree, child, units, least)
        elif _count(child.parameters()) >= max(least, 1) and tree.can_be_unit(child):
            found[name] = child
    return found


def _divided(tree: _Tree, units: Mapping[str, nn.Module], least: int, most: int) -> dict[str, nn.Module]:
    """Split units that are too large into the modules that they call."""
    result = dict(units)
    too_large = [name for name, module in units.items() if _own_numel(name, module, result) > most]
    while too_large:
        name = too_large.pop()
        parts = {
            part: module
            for part, module in _called_by(tree, result[name])
            if part not in result
            and tree.can_be_unit(module)
            and _count(module.parameters()) >= max(least, 1)
        }
        result |= parts
        too_large += [part for part, module in parts.items() if _own_numel(part, module, result) > most]
        # A small remainder goes to the unit above.
        if parts and _own_numel(name, result[name], result) < max(least, 1):
            del result[name]
    return result


def _called_by(tree: _Tree, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a forward calls, including those in lists."""
    if not _calls_children(module):
        return
    for child in module.children():
        if isinstance(child, _LISTS):
            yield from _called_by(tree, child)
        else:
            yield tree.name_of(child), child


def _own_numel(name: str, module: nn.Module, units: Mapping[str, nn.Module]) -> int:
    inside = (
        other for other_name, other in units.items() if other_name != name and _is_below(other_name, name)
    )
    taken = {id(parameter) for other in inside for parameter in other.parameters()}
    return _count(p for p in module.parameters() if id(p) not in taken)


def _with_parameters(tree: _Tree, units: Mapping[str, nn.Module]) -> tuple[FoundUnit, ...]:
    """Return each unit with the parameters of no inner unit; inner units come first."""
    names = {id(parameter): name for name, parameter in tree.root.named_parameters()}
    taken: set[int] = set()
    found = []
    for name, module in [*_inside_first(tree.root, units), ("", tree.root)]:
        own = {names[id(p)]: p for p in module.parameters() if id(p) not in taken}
        taken |= {id(parameter) for parameter in own.values()}
        if own or not name:
            found.append(FoundUnit(name, module, own))
    return tuple(found)


def _inside_first(root: nn.Module, units: Mapping[str, nn.Module]) -> Sequence[tuple[str, nn.Module]]:
    """Sort units by definition, each after its inner units."""
    last: dict[str, int] = {}
    for index, (name, _) in enumerate(root.named_modules()):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            last[".".join(parts[:length])] = index
    return sorted(units.items(), key=lambda unit: (last[unit[0]], -unit[0].count(".")))


def _calls_children(module: nn.Module) -> bool:
    """Return True if its forward calls its children instead of using their weights directly."""
    if not any(True for child in module.children() for _ in child.parameters()):
        return False
    if isinstance(module, _DIVISIBLE):
        return True
    # Classes of parametrized modules are in torch.nn too.
    return not type(module).__module__.startswith("torch.nn.")


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_below(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def padded_numel(parameter: nn.Parameter, world_size: int) -> int:
    """Return the elements that all ranks together hold, when its first dim is split into equal shards.

    Example:
        >>> padded_numel(nn.Linear(3, 5).weight, 4)
        24
    """
    if parameter.ndim == 0 or parameter.numel() == 0:
        return parameter.numel()
    rows = parameter.shape[0]
    return -(-rows // world_size) * world_size * (parameter.numel() // rows)


def waste(units: Iterable[FoundUnit], *, world_size: int) -> float:
    """Return the share of elements that padding adds to the parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(30, 401, bias=False))
        >>> f"{waste(find_units(model), world_size=1):.2%} {waste(find_units(model), world_size=8):.2%}"
        '0.00% 1.75%'
    """
    parameters = [parameter for unit in units for parameter in unit.parameters.values()]
    needed = _count(parameters)
    held = sum(padded_numel(parameter, world_size) for parameter in parameters)
    return (held - needed) / needed if needed else 0.0
