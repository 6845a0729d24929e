"""``python look.py NAME ENGINE``: finds all strategies, runs ``nnx list`` and ``nnx show NAME``.

Prints what that imported. The commands look at plugins in other processes; a process that trains loads
them itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from nnx_checkpoint.cli.command import main
from nnx_core.names.discovery import inventory


def run(*arguments: str) -> Any:
    """The exit code of a command of ``nnx``; what it prints is dropped."""
    sys.argv = ["nnx", *arguments]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0


if __name__ == "__main__":
    name, engine = sys.argv[1:]
    inventory()
    codes = [run("list"), run("show", name)]
    heavy = [each for each in ("torch", "lightning", "pytorch_lightning", engine) if each in sys.modules]
    sys.stdout.write(json.dumps({"codes": codes, "imported": heavy}))
