"""The command ``nnx conformance``, as the command line sees it; `cli` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    """The entry point of the group ``nnx.commands``; it replaces the hint that nnx-core has."""
    app.command("conformance")(check_strategy)


def check_strategy(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a strategy, or pkg.module:Class of one that is not registered."),
    ] = None,
    *,
    full: Annotated[bool, typer.Option("--full", help="Try everything, at every world size.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A check or a group of checks; may be repeated.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="name=value for the strategy; may be repeated.")
    ] = None,
    accelerator: Annotated[
        str, typer.Option("--accelerator", help="Devices to run on; the largest jobs need three of them.")
    ] = "cpu",
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Module to import first; may be repeated.")
    ] = None,
    badge: Annotated[Path | None, typer.Option("--badge", help="Write an SVG badge to this file.")] = None,
    show_checks: Annotated[bool, typer.Option("--list", help="Only list the checks.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the tracebacks and the output of ranks that failed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check in real processes that a strategy keeps its promises."""
    from nnx_conformance import cli

    if show_checks:
        raise typer.Exit(cli.list_checks(as_json=as_json))
    if name is None:
        raise typer.BadParameter("Which strategy? Run `nnx list` to see the names.", param_hint="NAME")
    raise typer.Exit(
        cli.run(
            name,
            full=full,
            only=only or [],
            options=option or [],
            imports=imports or [],
            accelerator=accelerator,
            badge=badge,
            verbose=verbose,
            as_json=as_json,
        )
    )
