"""How a program looks on the page: its head, its lines, and their comments.

It owns text only; what the lines say comes from `emit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nnx_nnscaler.plan.program_plan import ProgramPlan

__all__ = ["Function", "Line", "header", "lay_out"]

_COLUMN = 88


class Line(NamedTuple):
    """One statement.

    Attributes:
        code: The statement.
        comment: What its result is.
        module: Fully qualified name of the submodule that it belongs to.
        source: The user's line that it comes from.
        context: Context manager that it runs in.
    """

    code: str
    comment: str = ""
    module: str = ""
    source: str = ""
    context: str = ""


class Function(NamedTuple):
    """A function.

    Attributes:
        name: Its name.
        arguments: Its arguments.
        comment: What it is; empty for none.
        lines: Its body.
    """

    name: str
    arguments: tuple[str, ...]
    comment: str
    lines: tuple[Line, ...]


def header(plan: ProgramPlan, title: str, imports: Sequence[str], *, training: bool) -> str:
    """The head of a program: what it is, and how to read it."""
    mode = "training" if training else "evaluation"
    ranks = f"{plan.size} rank" + ("s" if plan.size > 1 else "")
    return f'''"""Emitted by nnx-nnscaler: the forward of {title or "a module"}, in {mode} mode.

Policy {plan.policy!r}, for a plan unit of {ranks}. Every rank of the unit runs this same code on its own
parts, so there is one file and not one for each rank.

Comments give the shape that one process would see and how the ranks hold it: R every rank has the whole,
P every rank has a summand, S(d) it is cut along dim d, S(d,g) each of g groups along d is cut.
A method of rt named forward__backward changes that: the first half is what happens to the value, the
second what happens to its gradient. A file that was edited is refused when it is reused.
"""

import torch
import torch.nn.functional as F
{"".join(f"{line}{chr(10)}" for line in imports)}

'''


def lay_out(function: Function) -> str:
    """A function as text, with a comment wherever it goes on in another module or source line."""
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
