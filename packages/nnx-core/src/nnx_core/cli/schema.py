"""``nnx schema COMMAND``: the JSON Schema of what a command prints with ``--json``.

The schemas are files in ``schemas``, named after their commands. They allow no key that they do not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nnx_checkpoint.cli.output import print_error, print_table, print_text
from nnx_core.errors import OptionError


def documented() -> dict[str, Path]:
    """The schema of each command that prints JSON.

    Example:
        >>> documented()["ckpt inspect"].name
        'ckpt-inspect.json'
    """
    found = sorted(Path(__file__).with_name("schemas").glob("*.json"))
    return {path.stem.replace("-", " "): path for path in found}


def run(words: Sequence[str]) -> int:
    """Print the schema of a command, or which there are; 2 where there is none."""
    schemas, command = documented(), " ".join(words).removeprefix("nnx ")
    if not command:
        print_table(("command", "schema"), [[f"nnx {name}", f"nnx schema {name}"] for name in schemas])
        return 0
    if command not in schemas:
        remedy = f"Choose one of {', '.join(map(repr, schemas))}."
        print_error(OptionError(f"there is no schema of {command!r}.", remedy=remedy))
        return 2
    print_text(schemas[command].read_text(encoding="utf-8").rstrip())
    return 0
