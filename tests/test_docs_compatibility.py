"""The table of docs/compatibility.md is what ``nox -s compat`` ran; ``NNX_UPDATE_DOCS=1`` rewrites it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nnx_test_helpers.generated_docs import expect_block

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "compatibility.md"
TABLE = re.compile(r"(<!-- compatibility: [^\n]* -->\n).*?(<!-- end of compatibility -->)", re.DOTALL)


def read_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))
    return rows


def written(rows: list[dict[str, Any]]) -> str:
    """Return the table, and the versions of the engines, which do not depend on those of a row."""
    head = ["Python", "versions", "torch", "Lightning", "conformance"]
    cells = [
        [
            row["python"],
            row["edge"],
            *(row[name].partition("+")[0] for name in ("torch", "lightning")),
            row["checks"],
        ]
        for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
    (engines,) = {tuple(row["engines"].items()) for row in rows}
    named = ", ".join(" ".join(engine) for engine in engines)
    return "\n".join(["", *lines, "", f"All runs had {named}.", "", ""])


def test_the_page_shows_the_recorded_runs() -> None:
    expect_block(PAGE, TABLE, written(read_rows()), test=__file__)


def test_every_python_that_the_packages_name_ran_with_every_package() -> None:
    root = DOCS.parent
    pythons = re.search(r"^PYTHONS = \[(.*)\]$", (root / "noxfile.py").read_text(encoding="utf-8"), re.M)
    assert pythons
    newest = [row for row in read_rows() if row["edge"] == "newest" and not row["other_lightning"]]
    assert [row["python"].rpartition(".")[0] for row in newest] == re.findall(r"3\.\d+", pythons[1])
    folders = [*root.glob("packages/*"), *root.glob("examples/*")]
    names = {
        re.search(r'^name = "(.*)"$', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]
        for folder in folders
        if (folder / "pyproject.toml").exists()
    }
    for row in newest:
        assert set(row["packages"]) == names, row["python"]
