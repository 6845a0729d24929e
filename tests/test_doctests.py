"""The examples in docstrings are right."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _modules_with_examples() -> list[str]:
    names = []
    for source in sorted(ROOT.glob("packages/*/src")):
        for file in sorted(source.rglob("*.py")):
            if ">>>" in file.read_text(encoding="utf-8"):
                name = ".".join(file.relative_to(source).with_suffix("").parts)
                names.append(name.removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("module", _modules_with_examples())
def test_examples_in(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
