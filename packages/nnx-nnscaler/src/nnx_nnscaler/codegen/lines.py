"""Lines and functions of a generated program."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One statement.

    Attributes:
        code: The statement.
        comment: Describes its result.
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
        comment: Describes it; empty for none.
        lines: Its body.
    """

    name: str
    arguments: tuple[str, ...]
    comment: str
    lines: tuple[Line, ...]
