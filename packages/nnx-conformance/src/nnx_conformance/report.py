"""The results of a conformance run, as plain data, as text and as a badge.

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
"""Version of the plain data; removing or redefining a field raises it, adding one does not."""

Verdict = Literal["passed", "undeclared", "skipped", "failed"]
"""``undeclared``: the check passed, although the strategy declares that it cannot."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    Attributes:
        check: The name of the check.
        group: The group of the check.
        promise: The tested promise.
        verdict: The verdict.
        detail: The reason of a failure or skip, or the capability that the strategy could declare.
        seconds: The duration.
        log: Tracebacks and output of failed ranks.
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
    """The results of all selected checks.

    Attributes:
        strategy: The name of the strategy.
        kind: ``backend``, ``strategy`` or ``lightning``.
        owner: The distribution that provides it.
        target: The class of the strategy.
        profile: ``fast`` or ``full``.
        versions: The versions of Python, nnx-core, torch and Lightning.
        results: The results in running order.
        seconds: The duration, with the start of the workers.
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
        """Return the counts of the verdicts in one line."""
        counts = Counter(result.verdict for result in self.results)
        order: tuple[Verdict, ...] = ("passed", "failed", "skipped", "undeclared")
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {"schema": SCHEMA, "ok": self.ok, "summary": self.summary(), **asdict(self)}

    def badge(self) -> str:
        """Return an SVG image for a README: green, or red if a check failed."""
        count = len(self.failures) or sum(r.verdict in ("passed", "undeclared") for r in self.results)
        text = f"{count} check{'s' * (count != 1)} {'passed' if self.ok else 'failed'}"
        return _svg("nnx conformance", text, "#2e7d32" if self.ok else "#c62828")


class PrintedReport(TypedDict):
    """The results of the checks."""

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
    """A check in ``--list``.

    Attributes:
        requires: The capabilities that the check needs.
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
