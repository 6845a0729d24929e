"""Numbers that two pages give are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").splitlines()
MEASURED = [line for line in CHOOSING if "`python benchmarks/" in line and line.startswith("| `")]


def in_readme(row: str) -> list[str]:
    """The rows of the README with the same benchmark."""
    found = re.search(r"benchmarks/\w+\.py(?: [a-z]+)?", row)
    assert found
    return [line for line in README if line.startswith("|") and found[0] in line]


def test_most_of_what_was_measured_is_in_the_readme() -> None:
    assert len([row for row in MEASURED if in_readme(row)]) >= 5


@pytest.mark.parametrize("row", [row for row in MEASURED if in_readme(row)])
def test_a_ratio_on_the_page_is_that_of_the_readme(row: str) -> None:
    ratio = row.split("|")[3].strip()
    assert any(re.search(rf"(?<![\d.]){re.escape(ratio)}(?!\d)", line) for line in in_readme(row))


@pytest.mark.parametrize("row", MEASURED)
def test_every_benchmark_that_is_named_exists(row: str) -> None:
    for script in re.findall(r"benchmarks/\w+\.py", row):
        assert (ROOT / script).is_file()
