"""Progress bars on a terminal's standard error: bytes done, bytes per second, time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar while something goes through many bytes; nothing where nobody looks at a terminal.

    Args:
        doing: A participle that says what is being done, such as ``"verifying"``.

    Yields:
        To be called with the bytes done so far and their total.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(doing),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
