"""Compare blocks of pages with what the code says, or rewrite them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expect_block(page: Path, block: re.Pattern[str], text: str, *, test: str) -> None:
    """Compare a block of a page with its text; with ``NNX_UPDATE_DOCS=1`` write the text.

    Args:
        page: The page.
        block: A pattern with two groups, the marks before and after the block; it occurs once.
        text: The text between the marks.
        test: The ``__file__`` of the test, for the message.
    """
    written = page.read_text(encoding="utf-8")
    expected, found = block.subn(lambda match: match[1] + text + match[2], written)
    assert found == 1
    if os.environ.get("NNX_UPDATE_DOCS"):
        page.write_text(expected, encoding="utf-8")
    assert expected == written or os.environ.get("NNX_UPDATE_DOCS"), (
        f"run: NNX_UPDATE_DOCS=1 pytest {Path(test).name}"
    )
