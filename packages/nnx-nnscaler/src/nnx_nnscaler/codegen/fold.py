"""Fold repeated layers into one function.

A run is the lines that belong to one submodule: what they read, what they assign, and what equal ones share.

It knows Python's variables and nothing of tensors.
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
        form: The form that the lines of an equal submodule have in common.
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
    """The reads and assignments of a submodule's lines.

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


# Repeated layers as one function that is called in a loop, so that a program of many layers stays readable.
#
# It works on the lines of a program: runs of lines of ``blocks.0``, ``blocks.1``, ... that differ in nothing
# but the layer's name and the variables are printed once. It changes neither what runs nor in which order.


_SHORTEST = 3
"""Lines of a layer that is worth a function."""


_FOLDED = re.compile(r"(.*?[A-Za-z_]\w*)\.(\d+)(?:\.|$)")


def fold(
    lines: Sequence[Line], new_name: Callable[[str], str], known: Collection[str] = ()
) -> tuple[list[Function], list[Line]]:
    """Print repeated layers once.

    Args:
        lines: All lines of a function.
        new_name: Hands out identifiers that nothing else uses.
        known: Names of functions that the lines call.

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
    """The lines cut into layers and what lies between."""
    for place, group in groupby(lines, key=lambda line: layer_of(line.module)):
        piece = list(group)
        yield piece if place is None else run_of(f"{place[0]}.{place[1]}", piece, known)


def layer_of(module: str) -> tuple[str, int] | None:
    """Which member of which list of layers a submodule is in.

    Example:
        >>> layer_of("blocks.3.attn.q"), layer_of("head")
        (('blocks', 3), None)
    """
    found = _FOLDED.match(module)
    return None if found is None else (found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class _Chain:
    """Equal layers, one after the other.

    Attributes:
        runs: The layers.
        carried: Index of a free variable to that of the variable of the layer before that it is.
    """

    runs: tuple[Run, ...]
    carried: dict[int, int]


def _readers(pieces: Sequence[Run | list[Line]]) -> dict[str, set[int]]:
    """Which pieces read a variable that they did not assign."""
    found: dict[str, set[int]] = {}
    for index, piece in enumerate(pieces):
        for line in piece.lines if isinstance(piece, Run) else piece:
            for one in names_in(line.code):
                if not one.assigned and not (isinstance(piece, Run) and one.name in piece.defined):
                    found.setdefault(one.name, set()).add(index)
    return found


def _chain(pieces: Sequence[Run | list[Line]], start: int, readers: dict[str, set[int]]) -> _Chain | None:
    """The longest chain of equal layers that begins here."""
    first = pieces[start]
    if not isinstance(first, Run) or len(first.lines) < _SHORTEST:
        return None
    if any("{" in line.code for line in first.lines):  # which would mean something else in an f-string
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
    """Which free variables of a layer the one before made; None if another is not the same for both."""
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
    """The function of equal layers, and the loop that calls it."""
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
