"""Which modules are sharded together: the choice of units, and the reason for it.

A unit is gathered and freed as one, so it should be one layer of a deep model: large enough to make its
collective worthwhile, small enough that one or two at a time fit beside the shards.

Some modules a forward chooses between: experts, a head per task, a branch for some samples. Ranks have
different data, so such a module may run on some ranks only, and nothing may be gathered when it does. Whether
a forward chooses is read off its source, as an example input would show one choice only::

    for block in self.blocks:            # in order: every rank calls each of them
        x = block(x)
    for index, expert in enumerate(self.experts):
        if (route == index).any():       # by choice
            ...
    self.heads[task](x)                  # by choice
    run(expert, x) ; run(self.experts, x)  # nobody knows what `run` does: by choice

Conditions on what modules and configurations hold (``if self.training``, ``if mask is None``) are the
same on all ranks. What cannot be read counts as called in order, unless it is named after experts: a
wrong guess costs memory one way, and an error that names the module the other way
(`nnx_core.agree.collective_order.CollectiveOrder`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType

from torch import nn

from nnx_core.errors import OptionError
from nnx_core.view.modules import Layers

_OF_DATA = {
    "all",
    "any",
    "count_nonzero",
    "item",
    "len",
    "max",
    "min",
    "nonzero",
    "numel",
    "size",
    "sum",
    "tolist",
}
_HARMLESS = {
    "enumerate",
    "isinstance",
    "iter",
    "len",
    "list",
    "next",
    "print",
    "range",
    "reversed",
    "tuple",
    "zip",
}
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.")


def called_by_choice(root: nn.Module) -> set[nn.Module]:
    """Modules under `root` that a forward chooses between, with everything inside of them."""
    found: set[nn.Module] = set()
    for module in root.modules():
        read = _read(type(module))  # type: ignore[arg-type] # a class can be hashed
        for name, child in module.named_children():
            is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            is_expert = "expert" in name.lower() and name not in read.in_order
            if name in read.by_choice or (is_list and (is_expert or name in read.passed)):
                found.update(child.modules())
    return found


@dataclass(slots=True)
class _Uses:
    """What methods do with attributes of their instance.

    Attributes:
        by_choice: Used on a condition on data, or with an index of data, or with elements given away.
        in_order: With elements that are used one after the other.
        passed: Given away as they are.
    """

    by_choice: set[str] = field(default_factory=set)
    in_order: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)


@cache
def _read(cls: type[nn.Module]) -> _Uses:
    uses = _Uses()
    for method in _methods(cls):
        _read_method(method, uses)
    uses.in_order -= uses.by_choice
    return uses


def _methods(cls: type[nn.Module]) -> Iterator[FunctionType]:
    """Those of the user's own classes, without what is overridden by a method that does not call it."""
    overridden: set[str] = set()
    for base in cls.__mro__:
        if base is object or f"{base.__module__}.".startswith(_LIBRARIES):
            continue
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name != "__init__" and name not in overridden:
                yield method
                if "super" not in method.__code__.co_names:
                    overridden.add(name)


def _read_method(method: FunctionType, uses: _Uses) -> None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):  # made at run time
        return
    function = tree.body[0]
    if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.args.args:
        reader = _Reader(function.args.args[0].arg, uses)
        for statement in function.body:
            reader.visit(statement)


class _Reader(ast.NodeVisitor):
    """Walks over one method.

    Args:
        own: The name that the method gives its instance.
        uses: Filled.
    """

    def __init__(self, own: str, uses: _Uses) -> None:
        self._uses = uses
        self._own = own
        self._elements: dict[str, set[str]] = {}  # variables, and the attributes that they come from
        self._counters: set[str] = set()
        self._conditions = 0

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_own(node) and self._conditions:
            self._uses.by_choice.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        (self._uses.by_choice if self._conditions else self._uses.in_order).update(
            self._elements.get(node.id, ())
        )

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_own(node.value):
            attribute = node.value.attr  # type: ignore[attr-defined] # `_is_own` says so
            names = {part.id for part in ast.walk(node.slice) if isinstance(part, ast.Name)}
            is_fixed = isinstance(node.slice, ast.Slice) or names <= self._counters | {self._own}
            (self._uses.in_order if is_fixed else self._uses.by_choice).add(attribute)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        taken = [value.value if isinstance(value, ast.Subscript) else value for value in values]
        attributes = {value.attr for value in taken if self._is_own(value)}  # type: ignore[attr-defined]
        self.visit(node.value)
        for part in ast.walk(ast.Tuple(node.targets)):
            if isinstance(part, ast.Name):
                self._elements[part.id] = attributes

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called not in _HARMLESS and "checkpoint" not in called:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.Name):
                    self._uses.by_choice.update(self._elements.get(argument.id, ()))
                elif isinstance(argument, ast.Subscript) and self._is_own(argument.value):
                    self._uses.by_choice.add(argument.value.attr)  # type: ignore[attr-defined]
                elif self._is_own(argument):
                    self._uses.passed.add(argument.attr)  # type: ignore[attr-defined]
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._enter_loop(node.target, node.iter)
        skipping = any(_leaves_loop(statement) for statement in node.body)
        self._visit_under(skipping, node.body)
        self._visit_under(False, node.orelse)

    def _visit_comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
    ) -> None:
        for loop in node.generators:
            self._enter_loop(loop.target, loop.iter)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._visit_under(any(_is_of_data(test) for loop in node.generators for test in loop.ifs), parts)

    visit_ListComp = _visit_comprehension  # noqa: N815 (ast's names)
    visit_GeneratorExp = _visit_comprehension  # noqa: N815
    visit_SetComp = _visit_comprehension  # noqa: N815
    visit_DictComp = _visit_comprehension  # noqa: N815

    def visit_If(self, node: ast.If | ast.While) -> None:
        self.visit(node.test)
        self._visit_under(_is_of_data(node.test), [*node.body, *node.orelse])

    visit_While = visit_If  # noqa: N815

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_under(_is_of_data(node.test), [node.body, node.orelse])

    def _visit_under(self, condition: bool, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        self._conditions += condition
        for node in nodes:
            self.visit(node)
        self._conditions -= condition

    def _enter_loop(self, target: ast.expr, over: ast.expr) -> None:
        variables = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        attributes = {part.attr for part in ast.walk(over) if self._is_own(part)}  # type: ignore[attr-defined]
        for variable in variables:
            self._elements[variable] = attributes
        called = {
            part.func.id
            for part in ast.walk(over)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
        }
        names = {part.id for part in ast.walk(over) if isinstance(part, ast.Name)}
        if "range" in called or names <= {self._own, *called}:
            self._counters |= variables
        if not attributes:
            self.visit(over)

    def _is_own(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self._own
        )


def _is_of_data(test: ast.expr) -> bool:
    """Whether a condition looks into tensors or at how much of something there is."""
    for part in ast.walk(test):
        if isinstance(part, ast.Attribute) and part.attr in ("shape", *_OF_DATA):
            return True
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in _OF_DATA:
            return True
    return False


def _leaves_loop(statement: ast.stmt) -> bool:
    """Whether it goes on with the next round, or ends the loop, on a condition on data."""
    if isinstance(statement, ast.If):
        inside = list(_same_loop([*statement.body, *statement.orelse]))
        leaves = any(isinstance(part, (ast.Continue, ast.Break, ast.Return)) for part in inside)
        return (leaves and _is_of_data(statement.test)) or any(map(_leaves_loop, statement.body))
    return False


def _same_loop(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If):
            yield from _same_loop([*statement.body, *statement.orelse])


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
        policy: Layer class or classes, by their names too, or a function from module to bool; None finds
            repeated layers.
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
    if isinstance(policy, (str, type, list, tuple, set, frozenset)):
        layers = Layers(policy, option="auto_wrap_policy")
        layers.check(root)
        choice = _matching(root, lambda module: module in layers, minimum, f"auto_wrap_policy names {layers}")
    elif callable(policy):
        choice = _matching(root, policy, minimum, "auto_wrap_policy, a function, chose them")
    else:
        raise OptionError(
            f"auto_wrap_policy={policy!r} is of type {type(policy).__name__}.",
            remedy="Pass a layer class or its name, several, or a function from module to bool.",
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
        (), f"not split: no layers of min_num_params={minimum:,} or more parameters repeat in a container"
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
