"""Where pages, examples and benchmarks of the monorepo are, for the package's tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["from_repository"]


def from_repository(test: str, path: str) -> Path:
    """A file or folder of the monorepo; where a package's folder is alone, what asks for it is skipped.

    Args:
        test: The ``__file__`` of the test or module that asks.
        path: The path from the monorepo's root.
    """
    for folder in Path(test).resolve().parents:
        if folder.name == "packages":
            return folder.parent / path
    pytest.skip(f"reads {path} of the repository", allow_module_level=True)
