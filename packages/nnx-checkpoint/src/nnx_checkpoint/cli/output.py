"""How the command line prints: tables and bars on a terminal, plain aligned text elsewhere, JSON on request.

rich is imported only when a terminal is there to show its tables or bars.
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
"""Exit code after Ctrl-C, as a shell has it."""


def print_json(content: Any) -> None:
    """Print plain data as JSON, and nothing else; dataclasses in it are printed as objects."""
    print_text(json.dumps(content, indent=2, default=asdict))


def print_text(text: str) -> None:
    """Print a line of the answer."""
    sys.stdout.write(f"{printable(text)}\n")


def print_line(text: str, *, wrapped: int | None = None) -> None:
    """Print a line no wider than the terminal: cut, or wrapped and indented. Elsewhere it stays whole.

    Args:
        text: One line.
        wrapped: The indentation of the lines that follow where it is wrapped; None cuts it.
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
    """Print a line about the answer, where it does not disturb what reads the answer."""
    sys.stderr.write(f"{printable(text)}\n")


def printable(text: str) -> str:
    r"""The text with everything spelled out that would steer a terminal: files and plugins may hold anything.

    Example:
        >>> printable("a\x1b[31m")
        'a\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def print_error(error: NnxError) -> None:
    """Print what went wrong and its remedy, each on a line."""
    print_note(f"error: {error.message}")
    if error.remedy:
        print_note(f"remedy: {error.remedy}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; on a terminal the first and the last column are folded to fit."""
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
        # Text, because square brackets in a cell would be read as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names with their values, leaving out the empty ones."""
    shown = [(f"{name}:", value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print_line(f"{name:{width}}  {value}", wrapped=width + 2)


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar while something goes through many bytes; nothing where nobody looks at a terminal.

    Args:
        doing: The participle of the operation, such as ``"verifying"``.

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


def human_bytes(count: int) -> str:
    """A size for people.

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
