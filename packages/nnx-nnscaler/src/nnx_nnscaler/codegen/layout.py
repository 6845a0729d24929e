"""Lay out a program as text: its head, its lines, and their comments.

`emit` decides the content of the lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from nnx_nnscaler.codegen.fold import names_in, run_of
from nnx_nnscaler.codegen.lines import Function, Line
from nnx_nnscaler.ir.graph import Graph, Op
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.plan.recompute import recomputed_owner

__all__ = [
    "fold_recomputed",
    "header",
    "lay_out",
    "recomputed_owner",
]


_COLUMN = 88


def header(plan: ProgramPlan, title: str, imports: Sequence[str], *, training: bool) -> str:
    """Return the head of a program: its description, and a guide to reading it."""
    mode = "training" if training else "evaluation"
    ranks = f"{plan.size} rank" + ("s" if plan.size > 1 else "")
    return f'''"""Emitted by nnx-nnscaler: the forward of {title or "a module"}, in {mode} mode.

Policy {plan.policy!r}, for a plan unit of {ranks}. Every rank of the unit runs this same code on its own
shards, so all ranks share one file.

Comments give the global shape and its placement: R every rank has all elements (replicated), P every rank
has a summand (partial), S(d) sharded along dim d, S(d,g) each of g groups along d is sharded.
A method of rt named forward__backward converts it: the first half converts the value, the second its
gradient. An edited file is refused when it is reused.
"""

import torch
import torch.nn.functional as F
{"".join(f"{line}{chr(10)}" for line in imports)}

'''


def lay_out(function: Function) -> str:
    """Return a function as text, with a comment at each change of module or source line."""
    text = [f"def {function.name}({', '.join(function.arguments)}):"]
    if function.comment:
        text.append(f'    """{function.comment}"""')
    place, context = ("", ""), ""
    for line in function.lines:
        if (line.module, line.source) != place and line.module + line.source:
            text.append(f"    # {' · '.join(filter(None, (line.module or '(root)', line.source)))}")
        place = (line.module, line.source)
        if line.context and line.context != context:
            text.append(f"    with {line.context}:")
        context = line.context
        text.append(_with_comment(f"{'        ' if context else '    '}{line.code}", line.comment))
    return "\n".join(text) + "\n"


def _with_comment(code: str, comment: str) -> str:
    return f"{code.ljust(_COLUMN)} # {comment}" if comment else code


# Make functions of submodules whose activations backward recomputes.


log = logging.getLogger("nnx.nnscaler")


def fold_recomputed(
    lines: Sequence[Line], graph: Graph, patterns: Sequence[str], new_name: Callable[[str], str]
) -> tuple[list[Function], list[Line]]:
    """Make functions of the lines of submodules to recompute.

    A submodule that writes to buffers keeps its activations, because a second run would write again.

    Args:
        lines: All lines of the program.
        graph: The graph of the program.
        patterns: Patterns of fully qualified names of submodules.
        new_name: A function that returns unused identifiers.

    Returns:
        The functions, and the lines with their calls.
    """
    if not patterns or not graph.training:
        return [], list(lines)
    writing = {recomputed_owner(op.module, patterns) for op in graph.ops if _writes(op, graph)} - {None}
    for name in sorted(filter(None, writing)):
        log.warning("recompute: skip %s, because it writes to a buffer and would write twice", name)
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
    """Return True if an operator writes to a buffer."""
    name = op.target.rpartition(".")[0].rpartition(".")[2]
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or ("_norm" in name and any(operand in graph.buffers for operand in op.operands()))
