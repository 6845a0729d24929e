"""Run cases that hypothesis generates, and count the verdicts."""

from __future__ import annotations

import collections
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from fuzz.edits import Case, cases
from fuzz.judging import Judge

__all__ = ["Figures", "survey"]


@dataclass
class Figures:
    """The results of the cases of a format.

    Attributes:
        counts: The number of cases with each kind of verdict.
        findings: The defects, without numbers, each with its first case.
    """

    format: str
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: dict[str, tuple[int, str, Case]] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ("refused", "right", "forged", "wrong")
        total = sum(self.counts.values())
        shown = ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds)
        lines = [f"{self.format}: {total} cases, {shown}"]
        lines += [f"  {count} x {why}\n      {case}" for count, why, case in self.findings.values()]
        return "\n".join(lines)


def survey(format: str, count: int, *, start: int = 0) -> Figures:
    """Judge a number of cases of a format.

    Args:
        format: The name of the format.
        count: The number of cases.
        start: The first case. The same number gives the same cases.
    """
    figures = Figures(format)

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(case=cases)
    def one(case: Case) -> None:
        verdict = judge.judge(case)
        if verdict.kind == "skipped":
            reject()
        figures.counts[verdict.kind] += 1
        if verdict.kind == "wrong":
            key = re.sub(r"\d+(?!:)|: .*", "", verdict.why) if "opening" in verdict.why else verdict.why[:60]
            known, _, _ = figures.findings.get(key, (0, "", case))
            figures.findings[key] = (
                known + 1,
                *(figures.findings[key][1:] if known else (verdict.why, case)),
            )

    with tempfile.TemporaryDirectory() as place, Judge(format, Path(place)) as judge:
        one()
    return figures
