"""Print tables and bars on a terminal, plain aligned text elsewhere, JSON on request.

rich is imported only for tables and bars on a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nnx_base.errors import NnxError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""


def print_json(content: Any) -> None:
    """Print plain data as JSON, with dataclasses as objects."""
    print_text(json.dumps(content, indent=2, default=asdict))


def print_text(text: str) -> None:
    """Print a line of the result on stdout."""
    sys.stdout.write(f"{printable(text)}\n")


def print_line(text: str, *, wrapped: int | None = None) -> None:
    """Print a line no wider than the terminal: truncated, or wrapped and indented (unchanged elsewhere).

    Args:
        text: One line.
        wrapped: The indentation of wrapped lines; None truncates the line.
    """
    if not _on_terminal():
        print_text(text)
        return
    width, own = shutil.get_terminal_size().columns, len(text) - len(text.lstrip())
    if wrapped is not None:
        wrapper = textwrap.TextWrapper(width, " " * own, " " * wrapped, break_long_words=False)
        wrapper.break_on_hyphens = False
        text = wrapper.fill(text.strip())
    elif len(text) > width:
        text = f"{text[: width - 1].rstrip()}\u2026"
    print_text(text)


def print_note(text: str) -> None:
    """Print a line on stderr, so that it does not disturb a program that reads the result."""
    sys.stderr.write(f"{printable(text)}\n")


def printable(text: str) -> str:
    r"""Return the text with terminal control characters escaped (files and plugins may hold any).

    Example:
        >>> printable("a\x1b[31m")
        'a\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def print_error(error: NnxError) -> None:
    """Print the message of an error and its remedy, each on a line."""
    print_note(f"error: {error.message}")
    if error.remedy:
        print_note(f"remedy: {error.remedy}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; on a terminal the first and the last column wrap to fit."""
    if not _on_terminal():
        _print_plain([[title.upper() for title in header], *rows])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, title in enumerate(header):
        table.add_column(title, overflow="fold", no_wrap=0 < index < len(header) - 1)
    for row in rows:
        # `Text`, because rich would read square brackets in a cell as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names with their values, without empty ones."""
    shown = [(f"{name}:", value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print_line(f"{name:{width}}  {value}", wrapped=width + 2)


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager that draws a progress bar in bytes (nothing without a terminal).

    Args:
        doing: The participle of the operation, such as ``"verifying"``.

    Yields:
        A function of the bytes done so far and their total.
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


def human_bytes(count: int) -> str:
    """Return a size as readable text.

    Example:
        >>> human_bytes(1_020_700_000)
        '1.02 GB'
    """
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_text("  ".join(cells).rstrip())
