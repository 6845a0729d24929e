"""``nnx list``: the names that can be used, and with ``--all`` those that could be or once could."""

from __future__ import annotations

from nnx_checkpoint.cli.output import print_json, print_note, print_table
from nnx_core.cli.entries import entries
from nnx_core.plugins import inventory

__all__ = ["note_problems", "run"]


def run(*, everything: bool, as_json: bool) -> int:
    """Print the list; a broken plugin is mentioned, and is `nnx doctor`'s matter."""
    rows = entries(everything=everything)
    if as_json:
        problems = [problem.as_dict() for problem in inventory().problems]
        print_json({"strategies": rows, "problems": problems})
        return 0
    if rows:
        print_table(
            ("name", "status", "provided by", "description"),
            [[row["name"], row["status"], row["provided_by"], row["description"]] for row in rows],
        )
    else:
        print_note("No strategy is installed. `nnx list --all` shows what could be.")
    note_problems()
    return 0


def note_problems() -> None:
    """Name the plugins that cannot be used, beside the answer."""
    problems = inventory().problems
    for problem in problems:
        print_note(f"problem: plugin {problem.plugin!r}: {problem.detail}")
    if problems:
        print_note(f"{len(problems)} problem(s) with plugins: run `nnx doctor`.")
