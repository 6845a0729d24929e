"""Fold repeated layers into one function.

A run is the lines of one submodule, with the variables that they read and assign, and the form of equal runs.

This module handles Python variables and knows no tensors.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from nnx_nnscaler.codegen.lines import Function, Line

_GLOBALS = frozenset({"rt", "m", "w", "c", "torch", "F", *dir(builtins)})


_LAYER = "layer"
"""The argument with the submodule's name, in a function of lines."""


class Name(NamedTuple):
    """A variable in a line, with its position; `assigned` is True if the line assigns it."""

    start: int
    end: int
    name: str
    assigned: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive lines of one submodule.

    Attributes:
        owner: The fully qualified name of the submodule.
        lines: The lines.
        defined: The variables that the lines assign, in order.
        free: The variables that the lines read from before, in order.
        form: The text that the lines of equal submodules have in common.
    """

    owner: str
    lines: tuple[Line, ...]
    defined: tuple[str, ...]
    free: tuple[str, ...]
    form: tuple[tuple[str, ...], ...]

    def function(self, name: str, comment: str, returned: Sequence[str]) -> Function:
        """Return a function of these lines for all equal submodules; their name is an argument."""
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
        """Return short names for variables that begin with the submodule's name, as those of weights."""
        prefix = re.sub(r"\W", "_", self.owner) + "_"
        short = {old: old.removeprefix(prefix) for old in self.defined}
        distinct = len({*short.values(), *self.free}) == len(short) + len(self.free)
        usable = all(name.isidentifier() and name not in _GLOBALS for name in short.values())
        return short if distinct and usable else {old: old for old in self.defined}


def run_of(owner: str, lines: Sequence[Line], functions: Collection[str] = ()) -> Run:
    """Return the run of a submodule's lines.

    Args:
        owner: The fully qualified name of the submodule.
        lines: The lines.
        functions: The names of the program's functions in the lines.
    """
    defined: dict[str, int] = {}
    free: dict[str, int] = {}
    form = []
    for line in lines:
        for one in names_in(line.code):  # a line reads before it assigns, and `names_in` keeps that order
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
    """Return the variables of a line, in order."""
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
    """Return code with the submodule's name replaced by a variable."""
    escaped = re.escape(owner)
    code = re.sub(rf"(['\"]){escaped}\1", _LAYER, code)
    return re.sub(rf"(['\"]){escaped}\.", rf"f\1{{{_LAYER}}}.", code)


# Repeated layers become one function that a loop calls, so that a program of many layers stays readable. Runs
# of ``blocks.0``, ``blocks.1``, ... are printed once if they differ only in the layer's name and the
# variables. Folding changes neither the operators nor their order.


_SHORTEST = 3
"""Minimum lines of a layer that becomes a function."""


_FOLDED = re.compile(r"(.*?[A-Za-z_]\w*)\.(\d+)(?:\.|$)")


def fold(
    lines: Sequence[Line], new_name: Callable[[str], str], known: Collection[str] = ()
) -> tuple[list[Function], list[Line]]:
    """Print repeated layers once.

    Args:
        lines: All lines of a function.
        new_name: A function that returns unused identifiers.
        known: The names of functions that the lines call.

    Returns:
        The functions of the layers, and the lines with their calls.
    """
    pieces = list(_pieces(lines, known))
    used_by = _readers(pieces)
    functions: list[Function] = []
    left: list[Line] = []
    position = 0
    while position < len(pieces):
        chain = _chain(pieces, position, used_by)
        if chain is None:
            piece = pieces[position]
            left += piece.lines if isinstance(piece, Run) else piece
            position += 1
            continue
        function, calls = _folded(chain, new_name)
        functions.append(function)
        left += calls
        position += len(chain.runs)
    return functions, left


def _pieces(lines: Sequence[Line], known: Collection[str]) -> Iterator[Run | list[Line]]:
    """Yield the layers among the lines, and the lines between layers."""
    for place, group in groupby(lines, key=lambda line: layer_of(line.module)):
        piece = list(group)
        yield piece if place is None else run_of(f"{place[0]}.{place[1]}", piece, known)


def layer_of(module: str) -> tuple[str, int] | None:
    """Return the list of layers that a submodule is in, and its index there; None outside of lists.

    Example:
        >>> layer_of("blocks.3.attn.q"), layer_of("head")
        (('blocks', 3), None)
    """
    found = _FOLDED.match(module)
    return None if found is None else (found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class _Chain:
    """Consecutive equal layers.

    Attributes:
        runs: The layers.
        carried: The index of each free variable that the layer before defines, with the index there.
    """

    runs: tuple[Run, ...]
    carried: dict[int, int]


def _readers(pieces: Sequence[Run | list[Line]]) -> dict[str, set[int]]:
    """Return the pieces that read each variable without assigning it."""
    found: dict[str, set[int]] = {}
    for index, piece in enumerate(pieces):
        for line in piece.lines if isinstance(piece, Run) else piece:
            for one in names_in(line.code):
                if not one.assigned and not (isinstance(piece, Run) and one.name in piece.defined):
                    found.setdefault(one.name, set()).add(index)
    return found


def _chain(pieces: Sequence[Run | list[Line]], start: int, readers: dict[str, set[int]]) -> _Chain | None:
    """Return the longest chain of equal layers that begins here.

    A loop can pass values from one layer to the next, but no other value out of a layer. So a chain ends
    where a later line reads another result.
    """
    first = pieces[start]
    if not isinstance(first, Run) or len(first.lines) < _SHORTEST:
        return None
    if any("{" in line.code for line in first.lines):  # a brace would open a field of the f-string
        return None
    runs = [first]
    carried: dict[int, int] | None = None
    for index in range(start + 1, len(pieces)):
        following = pieces[index]
        if not isinstance(following, Run) or following.form != first.form:
            break
        if layer_of(following.owner) != _next(runs[-1].owner):
            break
        link = _carried(runs[-1], following)
        if link is None or (carried is not None and carried != link):
            break
        if not _only_carried(runs[-1], readers, index, set(link.values())):
            break
        runs.append(following)
        carried = link
    while len(runs) > 1 and carried is not None:
        if _only_carried(runs[-1], readers, None, set(carried.values())):
            return _Chain(tuple(runs), carried)
        runs.pop()
    return None


def _next(owner: str) -> tuple[str, int]:
    prefix, _, number = owner.rpartition(".")
    return prefix, int(number) + 1


def _carried(before: Run, run: Run) -> dict[int, int] | None:
    """Return the free variables that the layer before defines; None if another one differs between both."""
    link = {}
    for index, (mine, its) in enumerate(zip(run.free, before.free, strict=True)):
        if mine in before.defined:
            link[index] = before.defined.index(mine)
        elif mine != its:
            return None
    return link if len(set(link.values())) == len(link) else None


def _only_carried(run: Run, readers: dict[str, set[int]], reader: int | None, carried: set[int]) -> bool:
    """Return True if only carried values leave a layer, and only the given piece reads them."""
    for index, name in enumerate(run.defined):
        others = readers.get(name, set())
        if reader is not None and others - {reader}:
            return False
        if others and index not in carried:
            return False
    return True


def _folded(chain: _Chain, new_name: Callable[[str], str]) -> tuple[Function, list[Line]]:
    """Return the function of equal layers, and the loop that calls it."""
    first, last = chain.runs[0], chain.runs[-1]
    prefix, _, start = first.owner.rpartition(".")
    name = new_name(prefix.rpartition(".")[2])
    returned = [first.defined[made] for made in chain.carried.values()]
    comment = f"Layers {first.owner} to {last.owner}, which are alike."
    results = {free: last.defined[made] for free, made in chain.carried.items()}
    values = [results.get(index, old) for index, old in enumerate(first.free)]
    count = f"{start}, {_next(last.owner)[1]}" if start != "0" else str(_next(last.owner)[1])
    layer = f'f"{prefix}.{{i}}"'
    call = f"{name}({', '.join(['rt', 'm', 'w', 'c', layer, *values])})"
    targets = f"{', '.join(results.values())} = " if results else ""
    lines = [Line(f"{new} = {first.free[index]}") for index, new in results.items()]
    lines += [Line(f"for i in range({count}):"), Line(f"    {targets}{call}")]
    return first.function(name, comment, returned), lines
