"""Repeated layers as one function that is called in a loop, so that a program of many layers stays readable.

It works on the lines of a program: runs of lines of ``blocks.0``, ``blocks.1``, ... that differ in nothing
but the layer's name and the variables are printed once. It changes neither what runs nor in which order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from nnx_nnscaler.codegen.layout import Function, Line
from nnx_nnscaler.codegen.runs import Run, names_in, run_of

__all__ = ["fold", "layer_of"]

_SHORTEST = 3
"""Lines of a layer that is worth a function."""
_LAYER = re.compile(r"(.*?[A-Za-z_]\w*)\.(\d+)(?:\.|$)")


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


# --- runs ---------------------------------------------------------------------------------------


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
    found = _LAYER.match(module)
    return None if found is None else (found[1], int(found[2]))


# --- chains -------------------------------------------------------------------------------------


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
    """Whether nothing but what is carried leaves a layer, and nothing but the given piece reads it."""
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
