"""``python list_and_show.py NAME ENGINE``: find all strategies, run ``nnx list`` and ``nnx show NAME``.

Prints the heavy imports. The commands inspect plugins in other processes, unlike a process that trains.

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
    """Return the exit code of an ``nnx`` command, and drop its output."""
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
