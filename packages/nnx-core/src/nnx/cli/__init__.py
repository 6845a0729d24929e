"""The `nnx` command: what is installed, what it can do, and what is wrong with it.

Exit codes: 0 when all is well, 1 when something was found wrong, 2 for wrong usage. Each verb has a
module of its own and imports what it needs when it runs, so that listing stays fast and never imports
torch. `output` decides how things look.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nnx.cli.output import print_error
from nnx.errors import NnxError

__all__ = ["main"]

_CHECKPOINT_HELP = "Look into checkpoints and verify them."
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """The entry point of the console script."""
    try:
        _application(sys.argv[1:])(prog_name="nnx")
    except NnxError as error:
        print_error(error)
        raise SystemExit(1) from error


def _application(arguments: list[str]) -> typer.Typer:
    app = typer.Typer(
        name="nnx",
        help="Strategies for PyTorch Lightning: list them, describe them, check the installation.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("list")(list_strategies)
    app.command("show")(show_strategy)
    app.command("search")(search_strategies)
    app.command("doctor")(check_installation)
    app.command("conformance")(check_strategy)
    app.command("new")(create_plugin)
    app.command("schema")(print_schema)
    app.add_typer(_checkpoint_commands(arguments), name="ckpt", help=_CHECKPOINT_HELP)
    return app


def _checkpoint_commands(arguments: list[str]) -> typer.Typer:
    """The verbs on checkpoints; only their name and help unless this call is about them."""
    if arguments[:1] == ["ckpt"] or "_NNX_COMPLETE" in os.environ:
        from nnx.cli.ckpt import app

        return app
    placeholder = typer.Typer()
    placeholder.callback()(lambda: None)
    return placeholder


def list_strategies(
    everything: Annotated[
        bool, typer.Option("--all", help="Also what could be installed, and names of the past.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """List the strategies that can be used by name."""
    from nnx.cli.listing import run
    from nnx.plugins.outside import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run(everything=everything, as_json=as_json))


def show_strategy(
    name: Annotated[str, typer.Argument(help="Name of a strategy.")],
    as_json: _Json = False,
) -> None:
    """Describe one strategy: when to use it, what it can do, its options."""
    from nnx.cli.showing import run
    from nnx.plugins.outside import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run(name, as_json=as_json))


def search_strategies(
    words: Annotated[list[str], typer.Argument(help="What you look for; every word has to match.")],
    as_json: _Json = False,
) -> None:
    """Find a strategy among the installed, the known and those of the past."""
    from nnx.cli.search import run
    from nnx.plugins.outside import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run(words, as_json=as_json))


def check_installation(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also import every strategy, and take remarks for problems.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check versions and plugins, and say how to mend what is broken."""
    from nnx.cli.doctor import run
    from nnx.plugins.outside import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run(strict=strict, as_json=as_json))


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
    as_json: _Json = False,
) -> None:
    """Check in real processes that a strategy keeps its promises."""
    from nnx.cli import conformance

    if show_checks:
        raise typer.Exit(conformance.list_checks(as_json=as_json))
    if name is None:
        raise typer.BadParameter("Which strategy? Run `nnx list` to see the names.", param_hint="NAME")
    raise typer.Exit(
        conformance.run(
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


def create_plugin(
    path: Annotated[Path, typer.Argument(help="Directory of the project; new or empty.")] = Path(),
    *,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the distribution; by default that of the directory.")
    ] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="Name of the strategy.")] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="backend, or lightning for a strategy class of Lightning's.")
    ] = None,
    description: Annotated[
        str | None, typer.Option("--description", help="What the strategy is, in a line.")
    ] = None,
    author: Annotated[str | None, typer.Option("--author", help="By default git's user.name.")] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing; --json does so too.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Bring an older project's frame up to date instead.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Start a plugin of your own: a project that passes its tests and conformance at once."""
    from nnx.cli import new

    if update:
        raise typer.Exit(new.update(path, as_json=as_json))
    given = new.Given(distribution=name, strategy=strategy, kind=kind, description=description, author=author)
    raise typer.Exit(new.run(path, given, defaults=defaults, as_json=as_json))


def print_schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Such as list or ckpt inspect; by default, print which there are."),
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    from nnx.cli.schema import run

    raise typer.Exit(run(command or []))
