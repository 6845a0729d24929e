"""Which modules a forward chooses between: experts, a head per task, a branch for some samples.

Ranks have different data, so such a module may run on some ranks only, and nothing may be gathered when it
does. Whether a forward chooses is read off its source, as an example input would show one choice only::

    for block in self.blocks:            # in order: every rank calls each of them
        x = block(x)
    for index, expert in enumerate(self.experts):
        if (route == index).any():       # by choice
            ...
    self.heads[task](x)                  # by choice
    run(expert, x) ; run(self.experts, x)  # nobody knows what `run` does: by choice

Conditions on what modules and configurations hold (``if self.training``, ``if mask is None``) are the same
on all ranks. What cannot be read counts as called in order, unless it is named after experts: a wrong guess
costs memory one way, and an error that names the module the other way (`nnx_core.used.CollectiveOrder`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType

from torch import nn

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

    # --- uses ---------------------------------------------------------------------------------

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

    # --- loops and conditions -----------------------------------------------------------------

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
