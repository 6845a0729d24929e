"""``nnx list``: the names that can be used, and with ``--all`` those that could be or once could."""

from __future__ import annotations

from nnx.cli.entries import entries
from nnx.cli.output import print_json, print_note, print_table
from nnx.plugins import inventory

__all__ = ["run"]


def run(*, everything: bool, as_json: bool) -> int:
    """Print the list; a broken plugin is mentioned, and is `nnx doctor`'s matter."""
    rows = entries(everything=everything)
    problems = inventory().problems
    if as_json:
        print_json({"strategies": rows, "problems": [problem.as_dict() for problem in problems]})
        return 0
    if rows:
        print_table(
            ("name", "status", "provided by", "description"),
            [[row["name"], row["status"], row["provided_by"], row["description"]] for row in rows],
        )
    else:
        print_note("No strategy is installed. `nnx list --all` shows what could be.")
    if problems:
        print_note(f"{len(problems)} problem(s) with plugins: run `nnx doctor`.")
    return 0
