"""Where in the user's code something happened: by traceback, and by the notes on a trace's operators.

Owns what a source line looks like, and which submodule an error is to blame on.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nnx_nnscaler.trace.structure import Refusal

__all__ = ["Blame", "blame", "source_of"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')


@dataclass(frozen=True)
class Blame:
    """Who is to blame for a failed trace.

    Attributes:
        fqn: The innermost submodule that was running; ``""`` is the root.
        source: The user's line.
        reason: What went wrong, in few words.
    """

    fqn: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


def blame(error: BaseException, root: nn.Module) -> Blame:
    """The submodule in whose code an error was raised."""
    names = {id(vars(module)): name for name, module in root.named_modules()}
    best = Blame("", "", _reason(error))
    for part in _chain(error):
        for frame, line in traceback.walk_tb(part.__traceback__):
            path = frame.f_code.co_filename
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(vars(owner)) in names:
                best = Blame(names[id(vars(owner))], best.source, best.reason)
            if not path.startswith((_TORCH, _OWN, "<")):
                best = Blame(best.fqn, _line(path, line), best.reason)
        if best.fqn or best.source:
            return best
    return best


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: BaseException) -> str:
    if isinstance(error, Refusal):
        return str(error)
    name = type(error).__name__
    if "DataDependent" in name:
        return "its control flow or a size depends on the values of a tensor"
    first = str(error).strip().splitlines()
    return f"{name}: {first[0]}" if first else name


def _line(path: str, number: int) -> str:
    code = linecache.getline(path, number).strip()
    where = f"{Path(path).name}:{number}"
    return f"{where}: {code}" if code else where


def source_of(stack_trace: str | None) -> str:
    """The user's line in a note that a trace left on an operator, and torch's own where it differs.

    Example:
        >>> source_of(None)
        ''
    """
    frames = [(path, int(line)) for path, line in _FRAME.findall(stack_trace or "")]
    frames = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in frames if not frame[0].startswith((_TORCH, "<"))]
    if not users:
        return ""
    path, line = users[-1]
    text = _line(path, line)
    last_path, last = frames[-1]
    return text if (last_path, last) == (path, line) else f"{text} <- {Path(last_path).name}:{last}"
