"""Lines and functions of a generated program."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One statement.

    Attributes:
        code: The statement.
        comment: A description of its result.
        module: The fully qualified name of its submodule.
        source: The user's source line.
        context: The context manager around it.
    """

    code: str
    comment: str = ""
    module: str = ""
    source: str = ""
    context: str = ""


class Function(NamedTuple):
    """A function.

    Attributes:
        name: The function's name.
        arguments: The names of its arguments.
        comment: A description of it; empty for none.
        lines: The body.
    """

    name: str
    arguments: tuple[str, ...]
    comment: str
    lines: tuple[Line, ...]
