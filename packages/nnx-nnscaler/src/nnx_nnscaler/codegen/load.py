"""From source to a function that runs, such that tracebacks and debuggers show its lines."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Program", "load_program"]

Program = Callable[..., Any]
"""``forward(rt, m, w, c, *tensors)``."""


def load_program(source: str, *, path: Path | None = None) -> Program:
    """The function ``forward`` of a program's source.

    Args:
        source: What `emit` wrote.
        path: The file that holds it, for tracebacks; without one they show it from memory.
    """
    name = f"nnx_nnscaler_program_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = str(path) if path is not None else f"<{name}>"
    if path is None:
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    program: Program = module.forward
    return program
