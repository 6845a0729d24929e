"""Submodules whose activations are not kept: their lines as functions that run again in the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from nnx_nnscaler.codegen.layout import Function, Line
from nnx_nnscaler.codegen.runs import names_in, run_of
from nnx_nnscaler.ir import Graph, Op

__all__ = ["fold_recomputed", "recomputed_owner"]

log = logging.getLogger("nnx.nnscaler")


def recomputed_owner(module: str, patterns: Sequence[str]) -> str | None:
    """The outermost submodule around this one that is to be recomputed.

    Example:
        >>> recomputed_owner("blocks.3.mlp.0", ["blocks.*.mlp"])
        'blocks.3.mlp'
    """
    parts = module.split(".") if module else []
    for count in range(1, len(parts) + 1):
        owner = ".".join(parts[:count])
        if any(_matches(owner, pattern) for pattern in patterns):
            return owner
    return None


def _matches(owner: str, pattern: str) -> bool:
    """Whether a name fits a pattern, in which a star stands for one part of a name."""
    names, wanted = owner.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def fold_recomputed(
    lines: Sequence[Line], graph: Graph, patterns: Sequence[str], new_name: Callable[[str], str]
) -> tuple[list[Function], list[Line]]:
    """Make functions of the lines of submodules that are to be recomputed.

    A submodule that writes to buffers stays as it is, since running it again would write again.

    Args:
        lines: All lines of the program.
        graph: What it is the program of.
        patterns: Of fully qualified names of submodules.
        new_name: Hands out identifiers that nothing else uses.

    Returns:
        The functions, and the lines with their calls.
    """
    if not patterns or not graph.training:
        return [], list(lines)
    writing = {recomputed_owner(op.module, patterns) for op in graph.ops if _writes(op, graph)} - {None}
    for name in sorted(filter(None, writing)):
        log.warning("%s is not recomputed: it writes to a buffer, and would do so twice", name)
    functions: dict[tuple[object, ...], Function] = {}
    left: list[Line] = []
    groups = groupby(lines, key=lambda line: recomputed_owner(line.module, patterns))
    pieces = [(owner, list(group)) for owner, group in groups]
    for index, (owner, piece) in enumerate(pieces):
        if owner is None or owner in writing:
            left += piece
            continue
        run = run_of(owner, piece)
        later = _read_in(line for _, others in pieces[index + 1 :] for line in others)
        returned = [variable for variable in run.defined if variable in later]
        key = (run.form, tuple(map(run.defined.index, returned)))
        if key not in functions:
            wish = "_".join(part for part in owner.split(".") if not part.isdigit())
            functions[key] = run.function(new_name(wish), "Recomputed in the backward pass.", returned)
        arguments = ", ".join([functions[key].name, "m", "w", "c", f'"{owner}"', *run.free])
        targets = f"{', '.join(returned)} = " if returned else ""
        left.append(Line(f"{targets}rt.recomputed({arguments})", module=owner, source=piece[0].source))
    return list(functions.values()), left


def _read_in(lines: Iterable[Line]) -> set[str]:
    return {name.name for line in lines for name in names_in(line.code) if not name.assigned}


def _writes(op: Op, graph: Graph) -> bool:
    """Whether an operator changes a buffer."""
    name = op.target.rpartition(".")[0].rpartition(".")[2]
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or ("_norm" in name and any(operand in graph.buffers for operand in op.operands()))
