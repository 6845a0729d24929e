"""Paths of the monorepo's pages, examples and benchmarks, for the package tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["from_repository"]


def from_repository(test: str, path: str) -> Path:
    """Return a file or folder of the monorepo; skip the test if only the package's folder is present.

    Args:
        test: The ``__file__`` of the calling test or module.
        path: The path from the monorepo's root.
    """
    for folder in Path(test).resolve().parents:
        if folder.name == "packages":
            return folder.parent / path
    pytest.skip(f"reads {path} of the repository", allow_module_level=True)
