"""Define the `nnx` command: ``nnx ckpt``, and the commands of other distributions.

A distribution adds commands by an entry point of the group ``nnx.commands``: a function that takes the Typer
application. Those of nnx-core come first. A later one may replace an earlier command, as nnx-conformance does
with the hint to install it.

Exit codes: 0 for success, 1 for a problem found, 2 for wrong usage. Each verb imports its modules when it
runs, so that listing stays fast and never imports torch. `output` formats all text.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nnx_base.errors import NnxError
from nnx_checkpoint.cli.output import print_error, print_note, print_text

GROUP = "nnx.commands"

_CHECKPOINT_HELP = "Inspect, verify, compare and convert checkpoints."


def main() -> None:
    """Run the console script."""
    try:
        _application(sys.argv[1:])(prog_name="nnx")
    except NnxError as error:
        print_error(error)
        raise SystemExit(1) from error


def _application(arguments: list[str]) -> typer.Typer:
    app = typer.Typer(
        name="nnx",
        help="Inspect checkpoints and strategies for PyTorch Lightning, and check the installation.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != "nnx-core", entry.name)):
        try:
            entry.load()(app)
        except Exception as error:  # a broken distribution must not break `nnx ckpt`
            print_note(f"Ignoring the commands of {entry.name}: {type(error).__name__}: {error}")
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
    """Declare the options without a command."""


def _checkpoint_commands(arguments: list[str]) -> typer.Typer:
    """Return the verbs on checkpoints, or only their name and help if the command line is not about them."""
    if arguments[:1] == ["ckpt"] or "_NNX_COMPLETE" in os.environ:
        return app
    placeholder = typer.Typer()
    placeholder.callback()(lambda: None)
    return placeholder


# Only names and help of the verbs are here. Verbs that read only our own format never import torch.


class _Writes(TyperCommand):
    """A verb whose help lists the formats to write (looked up when the help is shown)."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Format the help with the list of formats; see click."""
        from nnx_checkpoint.cli.files import describe_writable

        self.epilog = describe_writable()
        super().format_help(ctx, formatter)


app = typer.Typer(no_args_is_help=True)

_Path = Annotated[str, typer.Argument(help="A checkpoint of any format: a directory, a file or a URL.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Trust = Annotated[
    bool,
    typer.Option("--trust", help="Allow a checkpoint of another program to run its code."),
]
_OnlyWeights = Annotated[bool, typer.Option("--only-weights", help="Use parameters and buffers only.")]
_To = Annotated[str | None, typer.Option("--to", help="Format to write (default: from the target's name).")]
_Options = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="NAME=VALUE", help="Option of the target format."),
]


@app.command("ls")
def list_checkpoints(
    path: Annotated[str, typer.Argument(help="A directory, a checkpoint or a URL.")] = ".",
    as_json: _Json = False,
) -> None:
    """List the checkpoints below a directory, their earlier saves, and interrupted ones."""
    from nnx_checkpoint.cli.files import run_ls

    raise typer.Exit(run_ls(path, as_json=as_json))


@app.command()
def inspect(
    path: _Path,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the tree of tensors to show.")] = 99,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the sizes into this image (.png, .svg, .pdf).")
    ] = None,
    trust: _Trust = False,
    as_json: _Json = False,
) -> None:
    """Show a checkpoint's tensors, optimizer, writer, rank state and sizes."""
    from nnx_checkpoint.cli.inspection import run

    raise typer.Exit(run(path, depth=depth, plot=plot, weights_only=not trust, as_json=as_json))


@app.command()
def verify(path: _Path, trust: _Trust = False, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its checksum, if the format has any."""
    from nnx_checkpoint.cli.verification import run_verify

    raise typer.Exit(run_verify(path, weights_only=not trust, as_json=as_json))


@app.command()
def diff(
    left: _Path,
    right: _Path,
    values: Annotated[bool, typer.Option(help="Also compare the values of tensors.")] = True,
    only_weights: _OnlyWeights = False,
    trust: _Trust = False,
    as_json: _Json = False,
) -> None:
    """Compare two checkpoints of any formats: names, shapes, types, objects and values."""
    from nnx_checkpoint.cli.verification import run_diff

    code = run_diff(
        left, right, values=values, only_weights=only_weights, weights_only=not trust, as_json=as_json
    )
    raise typer.Exit(code)


@app.command(cls=_Writes)
def merge(
    sources: Annotated[list[str], typer.Argument(help="A checkpoint, or all files of one.")],
    target: Annotated[str, typer.Argument(help="The file to write; it must not exist.")],
    to: _To = None,
    only_weights: _OnlyWeights = False,
    trust: _Trust = False,
    as_json: _Json = False,
) -> None:
    """Merge a sharded checkpoint of any size into one file, in little memory."""
    from nnx_checkpoint.cli.files import run_merge

    code = run_merge(
        sources, target, to=to, only_weights=only_weights, weights_only=not trust, as_json=as_json
    )
    raise typer.Exit(code)


@app.command(cls=_Writes)
def convert(
    source: _Path,
    target: Annotated[str, typer.Argument(help="The path to write to; it must not exist.")],
    *,
    to: _To = None,
    only_weights: _OnlyWeights = False,
    trust: _Trust = False,
    config: Annotated[
        str | None,
        typer.Option(help="The model's config.json, or a directory with it and a tokenizer (--to hf)."),
    ] = None,
    options: _Options = None,
    source_options: Annotated[
        list[str] | None,
        typer.Option("-i", "--source-option", metavar="NAME=VALUE", help="Option for reading the source."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint of any size in another format, in little memory."""
    from nnx_checkpoint.cli.files import run_convert

    code = run_convert(
        source,
        target,
        to=to,
        only_weights=only_weights,
        weights_only=not trust,
        config=config,
        options=options or [],
        source_options=source_options or [],
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command("gc")
def collect(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a directory with checkpoints.")],
    keep_previous: Annotated[
        int | None, typer.Option(min=0, help="Earlier complete saves of each to keep (default: all).")
    ] = None,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Hours without a change after which a save or conversion is abandoned."),
    ] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the files to remove.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove the files of killed saves and conversions, and earlier saves beyond those to keep."""
    from nnx_checkpoint.cli.files import run_gc

    code = run_gc(
        path, keep_previous=keep_previous, min_age=older_than * 3600, dry_run=dry_run, as_json=as_json
    )
    raise typer.Exit(code)
