"""What a conformance run found, and the forms in which it is shown: plain data, a line, a badge.

This module imports neither torch nor Lightning, so that `nnx schema conformance` answers at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

from typing_extensions import TypedDict

SCHEMA = 1
"""Of the plain data; it grows when a field changes its meaning or goes, not when one is added."""

Verdict = Literal["passed", "undeclared", "skipped", "failed"]
"""``undeclared``: it works although the strategy declares that it does not."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check.

    Attributes:
        check: Its name.
        group: Its group.
        promise: The promise that was tried.
        verdict: Says how it ended.
        detail: Why it failed or was skipped, or which capability could be declared.
        seconds: The time that it took.
        log: Tracebacks and output of the ranks, where a check failed because a rank did.
    """

    check: str
    group: str
    promise: str
    verdict: Verdict
    detail: str
    seconds: float
    log: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all checks that were tried.

    Attributes:
        strategy: The strategy that was checked.
        kind: ``backend``, ``strategy`` or ``lightning``.
        owner: The distribution it comes from.
        target: Its class.
        profile: ``fast`` or ``full``.
        versions: The versions of the packages that matter.
        results: The results in the order in which they were tried.
        seconds: The time that all of it took, with starting the workers.
    """

    strategy: str
    kind: str
    owner: str
    target: str
    profile: str
    versions: dict[str, str]
    results: Sequence[Result]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Result]:
        """The checks that failed."""
        return [result for result in self.results if result.verdict == "failed"]

    def summary(self) -> str:
        """Counts of the verdicts, in one line."""
        counts = Counter(result.verdict for result in self.results)
        order: tuple[Verdict, ...] = ("passed", "failed", "skipped", "undeclared")
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])

    def as_dict(self) -> dict[str, Any]:
        """This report as plain data for JSON."""
        return {"schema": SCHEMA, "ok": self.ok, "summary": self.summary(), **asdict(self)}

    def badge(self) -> str:
        """An SVG image for a README: green where all is well, red where a check failed."""
        count = len(self.failures) or sum(r.verdict in ("passed", "undeclared") for r in self.results)
        text = f"{count} check{'s' * (count != 1)} {'passed' if self.ok else 'failed'}"
        return _svg("nnx conformance", text, "#2e7d32" if self.ok else "#c62828")


class PrintedReport(TypedDict):
    """What became of the checks."""

    schema: Literal[1]
    ok: bool
    summary: str
    strategy: str
    kind: Literal["backend", "strategy", "lightning"]
    owner: str
    target: str
    profile: str
    versions: dict[str, str]
    results: list[Result]
    seconds: float


class ListedCheck(TypedDict):
    """A check, as ``--list`` shows it.

    Attributes:
        requires: The capabilities without which it is skipped.
    """

    check: str
    group: str
    promise: str
    requires: list[str]
    profile: Literal["fast", "full"]


Printed = PrintedReport | list[ListedCheck]


def _svg(label: str, text: str, colour: str) -> str:
    left, right = 7 * len(label) + 10, 7 * len(text) + 10
    label, text = escape(label), escape(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {text}">\n'
        f'<rect width="{left}" height="20" fill="#555"/>\n'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>\n'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">\n'
        f'<text x="{left / 2}" y="14">{label}</text>\n'
        f'<text x="{left + right / 2}" y="14">{text}</text>\n'
        "</g>\n</svg>\n"
    )
