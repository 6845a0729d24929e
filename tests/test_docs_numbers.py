"""Numbers that two pages give are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8").splitlines()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").splitlines()
MEASURED = [line for line in CHOOSING if "`python benchmarks/" in line and line.startswith("| `")]


def measured(row: str) -> list[str]:
    """The rows of docs/measured.md with the same benchmark."""
    found = re.search(r"benchmarks/\w+\.py(?: [a-z]+)?", row)
    assert found
    return [line for line in NUMBERS if line.startswith("|") and found[0] in line]


def test_most_of_what_was_measured_is_on_the_page_of_numbers() -> None:
    assert len([row for row in MEASURED if measured(row)]) >= 5


@pytest.mark.parametrize("row", [row for row in MEASURED if measured(row)])
def test_a_ratio_is_the_same_on_both_pages(row: str) -> None:
    ratio = row.split("|")[3].strip()
    assert any(re.search(rf"(?<![\d.]){re.escape(ratio)}(?!\d)", line) for line in measured(row))


@pytest.mark.parametrize("row", MEASURED)
def test_every_benchmark_that_is_named_exists(row: str) -> None:
    for script in re.findall(r"benchmarks/\w+\.py", row):
        assert (ROOT / script).is_file()
