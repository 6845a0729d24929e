"""Runs of lines that belong to one submodule: what they read, what they assign, and what equal ones share.

It knows Python's variables and nothing of tensors.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nnx_nnscaler.codegen.layout import Function, Line

__all__ = ["Name", "Run", "names_in", "run_of"]

_GLOBALS = frozenset({"rt", "m", "w", "c", "torch", "F", *dir(builtins)})
_LAYER = "layer"
"""The argument of a function of lines that is the submodule's name."""


class Name(NamedTuple):
    """A variable in a line: where, and whether it is assigned there."""

    start: int
    end: int
    name: str
    assigned: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive lines of one submodule.

    Attributes:
        owner: Fully qualified name of the submodule.
        lines: They.
        defined: Variables that they assign, in order.
        free: Variables that they read from before, in order.
        form: What the lines of an equal submodule have in common.
    """

    owner: str
    lines: tuple[Line, ...]
    defined: tuple[str, ...]
    free: tuple[str, ...]
    form: tuple[tuple[str, ...], ...]

    def function(self, name: str, comment: str, returned: Sequence[str]) -> Function:
        """A function of these lines, for every submodule that is equal; its name is an argument."""
        short = self._short_names()
        body = [
            line._replace(
                code=_generic(_renamed(line.code, short), self.owner),
                module=f"({_LAYER}){line.module[len(self.owner) :]}",
            )
            for line in self.lines
        ]
        results = ", ".join(short[variable] for variable in returned)
        body.append(Line(f"return {results}".rstrip()))
        return Function(name, ("rt", "m", "w", "c", _LAYER, *self.free), comment, tuple(body))

    def _short_names(self) -> dict[str, str]:
        """Variables without the submodule's name, which they have where a parameter gave them theirs."""
        prefix = re.sub(r"\W", "_", self.owner) + "_"
        short = {old: old.removeprefix(prefix) for old in self.defined}
        distinct = len({*short.values(), *self.free}) == len(short) + len(self.free)
        usable = all(name.isidentifier() and name not in _GLOBALS for name in short.values())
        return short if distinct and usable else {old: old for old in self.defined}


def run_of(owner: str, lines: Sequence[Line], functions: Collection[str] = ()) -> Run:
    """What lines of a submodule read and assign.

    Args:
        owner: Fully qualified name of the submodule.
        lines: They.
        functions: Names in them that are the program's functions.
    """
    defined: dict[str, int] = {}
    free: dict[str, int] = {}
    form = []
    for line in lines:
        for one in names_in(line.code):  # a line reads before it assigns
            if not one.assigned and one.name not in defined and one.name not in functions:
                free.setdefault(one.name, len(free))
        for one in names_in(line.code):
            if one.assigned:
                defined.setdefault(one.name, len(defined))
        marks = {name: f"<free {number}>" for name, number in free.items()}
        marks |= {name: f"<{number}>" for name, number in defined.items()}
        code = _generic(_renamed(line.code, marks), owner)
        form.append((code, line.comment, line.module[len(owner) :], line.source, line.context))
    return Run(owner, tuple(lines), tuple(defined), tuple(free), tuple(form))


@lru_cache(maxsize=1 << 14)
def names_in(code: str) -> tuple[Name, ...]:
    """The variables of a line, in order."""
    found = [
        Name(node.col_offset, node.end_col_offset or 0, node.id, isinstance(node.ctx, ast.Store))
        for node in ast.walk(ast.parse(code.removeprefix("return ")))
        if isinstance(node, ast.Name) and node.id not in _GLOBALS and node.id != "_"
    ]
    return tuple(sorted(found))


def _renamed(code: str, names: Mapping[str, str]) -> str:
    text: list[str] = []
    position = 0
    encoded = code.encode()
    for name in names_in(code):
        text += [encoded[position : name.start].decode(), names.get(name.name, name.name)]
        position = name.end
    return "".join([*text, encoded[position:].decode()])


def _generic(code: str, owner: str) -> str:
    """Code with the submodule's name out of a variable."""
    escaped = re.escape(owner)
    code = re.sub(rf"(['\"]){escaped}\1", _LAYER, code)
    return re.sub(rf"(['\"]){escaped}\.", rf"f\1{{{_LAYER}}}.", code)
