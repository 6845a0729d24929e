"""docs/conformance.md lists all checks; ``NNX_UPDATE_DOCS=1`` rewrites its tables."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nnx_conformance.check import GROUPS, Check, all_checks
from nnx_conformance.report import Report, Result
from nnx_test_helpers.repository import from_repository

PAGE = from_repository(__file__, "docs/conformance.md")
TABLES = re.compile(r"(<!-- checks: [^\n]* -->\n).*?(<!-- end of checks -->)", re.DOTALL)
ABOUT = {
    "numbers": "Training gives the numbers of one process.",
    "converges": "Training comes near one process, also where the numbers are not equal.",
    "stages": "Fit, validate, test and predict, in any order, and what happens between batches.",
    "models": "Models of every architecture, however they are built.",
    "lightning_api": "Module, callbacks, logged values, collectives and samplers behave as in one process.",
    "user_patterns": "User code around a model trains as in one process, or is refused with a remedy.",
    "checkpoints": "Saving and resuming, at any world size, also after kills and corruption.",
    "nodes": "Ranks of several simulated nodes.",
    "lifecycle": "The plugin's spec, launchers, Fabric, errors, repeated use and cleanup.",
}


def tables() -> str:
    sections = []
    for group in GROUPS:
        rows = [row(check) for check in all_checks() if check.group == group]
        head = ["| check | promise | needs |", "|---|---|---|"]
        sections.append("\n".join([f"### {group}", "", ABOUT[group], "", *head, *rows]))
    return "\n" + "\n\n".join(sections) + "\n\n"


def row(check: Check) -> str:
    needs = [f"`{requirement}`" for requirement in check.requires]
    if check.kinds != ("backend", "strategy", "lightning"):
        needs.append("asked of a " + " or ".join(check.kinds))
    if check.full:
        needs.append("`--full`")
    cells = (f"`{check.name}`", check.promise.replace("``", "`").replace("|", "\\|"), ", ".join(needs))
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_page_lists_every_check() -> None:
    page = PAGE.read_text(encoding="utf-8")
    expected, found = TABLES.subn(lambda match: match[1] + tables() + match[2], page)
    assert found == 1
    if os.environ.get("NNX_UPDATE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    elif page != expected:
        names = {check.name for check in all_checks()}
        listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) & names
        raise AssertionError(
            f"run: NNX_UPDATE_DOCS=1 pytest {Path(__file__).name} (not listed: {sorted(names - listed)})"
        )


def test_the_page_names_every_field_of_the_report() -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index("## The report as JSON") : page.index("## What is checked")]
    result = Result("c", "numbers", "It works.", "passed", "", 0.0)
    report = Report("s", "backend", "o", "t", "fast", {}, [result], 0.0).as_dict()
    for field in [*report, *report["results"][0]]:
        assert f"`{field}`" in section, field
