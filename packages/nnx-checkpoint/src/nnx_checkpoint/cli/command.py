"""The `nnx` command: ``nnx ckpt``, and what other distributions add to it.

A distribution adds commands by an entry point of the group ``nnx.commands``: a function that takes the Typer
application. Those of nnx-core come first; a later one may replace a command of an earlier one, as
nnx-conformance does with the hint that stands in for its own.

Exit codes: 0 when all is well, 1 when something was found wrong, 2 for wrong usage. Each verb has a
module of its own and imports what it needs when it runs, so that listing stays fast and never imports
torch. `output` decides how things look.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from nnx_checkpoint.cli.output import print_error, print_note, print_text
from nnx_checkpoint.errors import NnxError

GROUP = "nnx.commands"

_CHECKPOINT_HELP = "Look into checkpoints and verify them."


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
        help="Checkpoints and strategies for PyTorch Lightning: look into them, check the installation.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != "nnx-core", entry.name)):
        try:
            entry.load()(app)
        except Exception as error:  # one distribution that is broken must not take `nnx ckpt` along
            print_note(f"The commands of {entry.name} are left out: {type(error).__name__}: {error}")
    app.add_typer(_checkpoint_commands(arguments), name="ckpt", help=_CHECKPOINT_HELP)
    return app


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    for name in ("nnx-checkpoint", "nnx-core", "nnx-conformance", "torch", "lightning"):
        try:
            print_text(f"{name} {version(name)}")
        except PackageNotFoundError:
            print_text(f"{name} is not installed")
    raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print versions.", callback=_print_versions, is_eager=True)
    ] = False,
) -> None:
    """What belongs to no command."""


def _checkpoint_commands(arguments: list[str]) -> typer.Typer:
    """The verbs on checkpoints; only their name and help unless this call is about them."""
    if arguments[:1] == ["ckpt"] or "_NNX_COMPLETE" in os.environ:
        from nnx_checkpoint.cli.ckpt import app

        return app
    placeholder = typer.Typer()
    placeholder.callback()(lambda: None)
    return placeholder
