"""``nnx conformance``: check that a strategy keeps its promises.

Unlike other verbs on strategies it runs them, in worker processes, and takes minutes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnx.cli.output import print_json, print_note, print_table, print_text
from nnx.errors import OptionError

__all__ = ["list_checks", "run"]


def run(
    strategy: str,
    *,
    full: bool,
    only: Sequence[str],
    options: Sequence[str],
    imports: Sequence[str],
    badge: Path | None,
    as_json: bool,
) -> int:
    """Check a strategy and print what was found; 1 where it breaks a promise."""
    from nnx.testing.conformance import Result, Subject, run_conformance

    def show(result: Result) -> None:
        print_note(f"{result.verdict:>10}  {result.check}  ({result.seconds:.1f} s)")

    subject = Subject(strategy, options=parse_options(options), imports=tuple(imports))
    report = run_conformance(subject, full=full, only=only, report_result=show)
    if badge is not None:
        badge.write_text(report.badge(), encoding="utf-8")
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    return int(not report.ok)


def list_checks(*, as_json: bool) -> int:
    """Print every check and what it tries."""
    from nnx.testing.conformance import all_checks

    rows = [
        {
            "check": check.name,
            "group": check.group,
            "promise": check.promise,
            "requires": list(check.requires),
            "profile": "full" if check.full else "fast",
        }
        for check in all_checks()
    ]
    if as_json:
        print_json(rows)
    else:
        columns = ("group", "check", "profile", "promise")
        print_table(columns, [[str(row[column]) for column in columns] for row in rows])
    return 0


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """``name=value`` as keyword arguments; what is not a Python literal is text.

    Example:
        >>> parse_options(["min_num_params=100", "state_dict_type=sharded"])
        {'min_num_params': 100, 'state_dict_type': 'sharded'}

    Raises:
        OptionError: There is no ``=`` in an option.
    """
    parsed = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not sign:
            raise OptionError(f"--option {option!r} has no value.", remedy="Write --option name=value.")
        try:
            parsed[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[name] = value
    return parsed


def _print_report(report: Any) -> None:
    print_table(
        ("group", "check", "verdict", "seconds", "detail"),
        [[r.group, r.check, r.verdict, f"{r.seconds:.1f}", r.detail] for r in report.results],
    )
    print_text("")
    print_text(f"{report.strategy} ({report.kind}, {report.target}, from {report.owner})")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print_text(f"{report.profile} profile, {versions}")
    print_text(f"{report.summary()} in {report.seconds:.0f} s")
