"""The commands of nnx-core: list, describe and diagnose installed strategies.

`nnx_checkpoint.cli.command` starts the command and defines its behavior; other modules implement the verbs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from nnx_core.errors import NnxError, OptionError

__all__ = ["add_commands"]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer) -> None:
    """The entry point of the group ``nnx.commands``."""
    app.command("list")(list_strategies)
    app.command("show")(show_strategy)
    app.command("search")(search_strategies)
    app.command("choose")(choose_strategy)
    app.command("doctor")(check_installation)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("conformance", context_settings=anything)(ask_for_conformance)
    app.command("diff", context_settings=anything)(ask_for_diff)
    app.command("plan")(plan_run)
    app.command("new")(create_plugin)
    app.command("schema")(print_schema)
    app.command("run", context_settings={"allow_interspersed_args": False})(start_script)


def ask_for_conformance() -> None:
    """Check in real processes that a strategy keeps its promises; needs nnx-conformance."""
    raise NnxError(
        "`nnx conformance` is not installed.", remedy="Install it with `pip install nnx-conformance`."
    )


def ask_for_diff() -> None:
    """Find where two runs, or two checkpoints, begin to differ; needs nnx-conformance."""
    raise NnxError("`nnx diff` is not installed.", remedy="Install it with `pip install nnx-conformance`.")


def complete_strategy(incomplete: str) -> list[str]:
    """The names of strategies that begin so, for the shell."""
    from nnx_core.names.catalog import known
    from nnx_core.names.registry import StrategyRegistry

    return sorted(name for name in {*StrategyRegistry, *known()} if name.startswith(incomplete))


def list_strategies(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also options of others, what could be installed, and removed names."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """List the strategies that can be used by name."""
    from nnx_core.cli.strategies import run_list
    from nnx_core.names.plugin_processes import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run_list(everything=everything, as_json=as_json))


def show_strategy(
    name: Annotated[str, typer.Argument(help="Name of a strategy.", autocompletion=complete_strategy)],
    as_json: _Json = False,
) -> None:
    """Describe one strategy: its use, its options and its capabilities."""
    from nnx_core.cli.strategies import run_show
    from nnx_core.names.plugin_processes import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run_show(name, as_json=as_json))


def search_strategies(
    words: Annotated[list[str], typer.Argument(help="What you look for, in your own words.")],
    as_json: _Json = False,
) -> None:
    """Find the strategy, or the page of the documentation, that fits a few words."""
    from nnx_core.cli.search import run_search
    from nnx_core.names.plugin_processes import looking_from_outside

    with looking_from_outside():
        raise typer.Exit(run_search(words, as_json=as_json))


def choose_strategy(
    engine: Annotated[
        str | None, typer.Option("--engine", help="It depends on: no, deepspeed or fairscale.")
    ] = None,
    failures: Annotated[
        str | None, typer.Option("--failures", help="Machines fail, join or leave: no or yes.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option("--fit", help="The model fits on one device, all of them, or with the host.")
    ] = None,
    links: Annotated[
        str | None, typer.Option("--links", help="Links are fast, slow between nodes, or slow.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers are blocks, other, or large.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Choose a strategy by at most five questions; those without an option are asked."""
    from nnx_core.cli.choose import run
    from nnx_core.names.plugin_processes import looking_from_outside

    given = {"engine": engine, "failures": failures, "fit": fit, "links": links, "layers": layers}
    with looking_from_outside():
        raise typer.Exit(run(given, as_json=as_json))


def check_installation(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also import every strategy, and treat warnings as errors.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check versions and plugins, and suggest fixes."""
    try:
        from nnx_core.cli.doctor import run
        from nnx_core.names.plugin_processes import looking_from_outside
    except ModuleNotFoundError as error:
        raise NnxError(
            f"nnx-core is installed in part: it needs {error.name}, which is missing.",
            remedy=f"Run `pip install {error.name}`, or `pip install --force-reinstall nnx-core`.",
        ) from error

    with looking_from_outside():
        raise typer.Exit(run(strict=strict, as_json=as_json))


def plan_run(
    target: Annotated[str, typer.Argument(help="module:Class or file.py:Class of the model.")] = "",
    *,
    words: Annotated[
        list[str] | None, typer.Argument(help="With --script: its arguments.", show_default=False)
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many devices a node has.")] = 8,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="How many nodes there are.")] = 1,
    memory: Annotated[str | None, typer.Option("--memory", help="Of a device, such as 80GiB.")] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Of a node, for strategies that offload.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Of a device: 4x4096, or float32:8x3x32x32,int64:8.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="As of Trainer.")] = "32-true",
    accelerator: Annotated[str, typer.Option("--accelerator", help="cuda or cpu.")] = "cuda",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Of torch.optim, if the model configures none.")
    ] = "AdamW",
    init: Annotated[
        list[str] | None, typer.Option("--init", help="An argument of the class, as name=value.")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help="Only this one; several may be given.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", help="Plan the Trainer.fit of this script instead.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the memory over a step into this file.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Predict the memory of every strategy: fits or what is missing, and the cheapest cure."""
    from nnx_core.cli.plan import run

    given = [target, *(words or [])] if script is not None and target else list(words or [])
    if not target and script is None:
        raise OptionError("no model is given.", remedy="Write `nnx plan module:Class`, or --script train.py.")
    code = run(
        target,
        batch=batch,
        arguments=_values(init or [], "--init"),
        as_json=as_json,
        script=script,
        words=given,
        devices=devices,
        nodes=nodes,
        memory=memory,
        host_memory=host_memory,
        precision=precision,
        accelerator=accelerator,
        optimizer=optimizer,
        strategies=strategy,
        plot=plot,
    )
    raise typer.Exit(code)


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
    from nnx_core.cli import new

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
    from nnx_core.cli.schema import run

    raise typer.Exit(run(command or []))


def start_script(
    command: Annotated[
        list[str] | None, typer.Argument(help="The script and its arguments, after `--`.", show_default=False)
    ] = None,
    *,
    on: Annotated[
        str, typer.Option("--on", help="ray, torchrun, slurm, elastic, or the launcher of a plugin.")
    ] = "",
    elastic: Annotated[
        int, typer.Option("--elastic", min=0, help="Short for `--on elastic --option groups=N`.")
    ] = 0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="How many nodes there are.")] = 1,
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many processes a node has.")] = 1,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the launcher, as name=value; several may be given."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
) -> None:
    """Start a script in every process of a run, on one node or several."""
    from nnx_checkpoint.cli.output import print_text
    from nnx_core.launch.launcher import make_launcher

    if bool(on) == bool(elastic):
        raise OptionError(
            "one of --on and --elastic is needed, and not both.",
            remedy="Write `nnx run --on torchrun -- train.py`, or `nnx run --elastic 2 -- train.py`.",
        )
    if not command:
        what = f"--on {on}" if on else f"--elastic {elastic}"
        raise OptionError("no script is given.", remedy=f"Write `nnx run {what} -- train.py`.")
    given = _values(options or [], "--option")
    if elastic:
        on, given["groups"] = "elastic", elastic
    launcher, unknown = make_launcher(on, given)
    if unknown:
        known = ", ".join(item.name for item in fields(launcher.Options)) or "none"
        raise OptionError(
            f"launcher {on!r} has no option {next(iter(unknown))!r}.", remedy=f"Its options are {known}."
        )
    words = [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else command
    if dry_run:
        print_text(launcher.describe(words, nodes=nodes, devices=devices))
        return
    raise typer.Exit(launcher.run_script(words, nodes=nodes, devices=devices))


def _values(given: Sequence[str], flag: str) -> dict[str, Any]:
    """Return values that are given as ``name=value``: JSON where a value is JSON, otherwise text."""
    values: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"{flag} {text!r} has no value.", remedy=f"Write {flag} name=value.")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values
