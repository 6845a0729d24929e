"""The command ``nnx conformance``: its arguments, the run and the output."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnx_checkpoint.cli.output import print_error, print_json, print_note, print_table, print_text
from nnx_conformance.options import parse_options
from nnx_core.errors import OptionError, StrategyNotFoundError, StrategyNotInstalledError

if TYPE_CHECKING:
    from nnx_conformance.check import Check
    from nnx_conformance.report import ListedCheck, Report, Result

__all__ = [
    "add_commands",
    "parse_options",
]


# Unlike other commands this one runs strategies, in worker processes, for minutes. So it prints each result
# at once, and the details of failures at the end.


_ERASE = "\r\x1b[K"
"""Erases the current line of a terminal."""


def run(
    strategy: str,
    *,
    full: bool,
    only: Sequence[str],
    options: Sequence[str],
    imports: Sequence[str],
    accelerator: str,
    ranks: int | None,
    badge: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Check a strategy and print the results; return 1 for a broken promise, 2 for wrong arguments."""
    from nnx_conformance.runner import run_conformance, select_checks
    from nnx_conformance.subject import Subject

    try:
        subject = Subject(
            strategy, options=parse_options(options), imports=tuple(imports), accelerator=accelerator
        )
        count = len(select_checks(only, full=full))
        _announce("starting processes")
        report = run_conformance(
            subject,
            full=full,
            only=only,
            ranks=_ranks(ranks, accelerator),
            report_start=_announcing(count),
            report_result=_show_on_standard_error if as_json else _show,
        )
    except (OptionError, StrategyNotFoundError, StrategyNotInstalledError) as error:
        print_error(error)
        return 2
    if badge is not None:
        badge.write_text(report.badge(), encoding="utf-8")
    if as_json:
        print_json(report.as_dict())
    else:
        _conclude(report, verbose=verbose)
    return int(not report.ok)


def _ranks(asked: int | None, accelerator: str) -> int:
    """Return the number of ranks to use: three, or fewer on fewer GPUs."""
    from nnx_conformance.runner import WORKERS

    if asked is not None or accelerator not in ("cuda", "gpu"):
        return asked or WORKERS
    import torch

    return max(1, min(WORKERS, torch.cuda.device_count()))


def list_checks(*, as_json: bool) -> int:
    """Print every check and its promise."""
    from nnx_conformance.check import all_checks

    rows: list[ListedCheck] = [
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
        print_table(columns, [(row["group"], row["check"], row["profile"], row["promise"]) for row in rows])
    return 0


def _announcing(count: int) -> Callable[[Check], None]:
    """Return a function to call before each of so many checks."""
    numbers = itertools.count(1)
    return lambda check: _announce(f"[{next(numbers)}/{count}] {check.name}")


def _announce(activity: str) -> None:
    """Show the current activity on a terminal, in a line that the next result replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{_ERASE}{activity} ...")
        sys.stderr.flush()


def _show(result: Result) -> None:
    _erase_announcement()
    print_text(_line(result))
    sys.stdout.flush()


def _show_on_standard_error(result: Result) -> None:
    _erase_announcement()
    print_note(_line(result))


def _erase_announcement() -> None:
    if sys.stderr.isatty():
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


def _line(result: Result) -> str:
    """Format a result as one line; the reason of a failure is too long and follows later."""
    verdict = "FAILED" if result.verdict == "failed" else result.verdict
    reason = "" if result.verdict == "failed" else result.detail
    return (
        f"{verdict:<10}  {result.group:<13}  {result.check:<44}  {result.seconds:6.1f} s  {reason}".rstrip()
    )


def _conclude(report: Report, *, verbose: bool) -> None:
    for failure in report.failures:
        print_text(f"\nFAILED {failure.check}")
        _print_wrapped(f"promised: {failure.promise}")
        _print_wrapped(f"found: {failure.detail}")
        if verbose and failure.log:
            print_text(textwrap.indent(failure.log.rstrip(), "    "))
    print_text("")
    print_text(f"{report.strategy} ({report.kind}, {report.target}, from {report.owner})")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print_text(f"{report.profile} profile, {versions}")
    print_text(f"{report.summary()} in {report.seconds:.0f} s")
    if any(failure.log for failure in report.failures) and not verbose:
        print_note("--verbose prints the tracebacks; --only NAME repeats a single check.")


def _print_wrapped(text: str) -> None:
    width = max(60, shutil.get_terminal_size((110, 24)).columns)
    print_text(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    "))


def add_commands(app: typer.Typer) -> None:
    """Add the commands; the entry point in ``nnx.commands`` replaces nnx-core's placeholders."""
    from nnx_conformance.diff.command import diff

    app.command("conformance")(check_strategy)
    app.command("diff")(diff)


def check_strategy(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a strategy, or pkg.module:Class of an unregistered one."),
    ] = None,
    *,
    full: Annotated[bool, typer.Option("--full", help="Run all checks, at every world size.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A check or a group of checks; may be repeated.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="name=value for the strategy; may be repeated.")
    ] = None,
    accelerator: Annotated[
        str, typer.Option("--accelerator", help="Devices to run on; the largest jobs need three.")
    ] = "cpu",
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=3,
            help="Largest number of ranks; checks that need more are skipped. Default: 3, or one per GPU.",
        ),
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Module to import first; may be repeated.")
    ] = None,
    badge: Annotated[Path | None, typer.Option("--badge", help="Write an SVG badge to this file.")] = None,
    show_checks: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the tracebacks and the output of failed ranks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check in real processes that a strategy keeps its promises."""
    if show_checks:
        raise typer.Exit(list_checks(as_json=as_json))
    if name is None:
        raise typer.BadParameter("Which strategy? Run `nnx list` to see the names.", param_hint="NAME")
    raise typer.Exit(
        run(
            name,
            full=full,
            only=only or [],
            options=option or [],
            imports=imports or [],
            accelerator=accelerator,
            ranks=ranks,
            badge=badge,
            verbose=verbose,
            as_json=as_json,
        )
    )
