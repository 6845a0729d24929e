"""The command ``nnx diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnx_checkpoint.cli.output import print_json, print_note, print_text
from nnx_core.errors import OptionError

if TYPE_CHECKING:
    from nnx_conformance.diff.session import Result


def diff(
    target: Annotated[str, typer.Argument(help="A script, a checkpoint, or a directory of records.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="The script's arguments; or the second checkpoint or directory.", show_default=False
        ),
    ] = None,
    *,
    a: Annotated[str, typer.Option("--a", help="strategy@processes:precision of the reference.")] = "",
    b: Annotated[str, typer.Option("--b", help="The same of the other side.")] = "",
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many optimizer steps.")] = 3,
    batches: Annotated[
        int, typer.Option("--batches", min=1, help="Batches per step of a loop without a Trainer.")
    ] = 1,
    a_options: Annotated[
        list[str] | None, typer.Option("--a-option", help="name=value for side a's strategy.")
    ] = None,
    b_options: Annotated[
        list[str] | None, typer.Option("--b-option", help="name=value for side b's strategy.")
    ] = None,
    b_script: Annotated[str, typer.Option("--b-script", help="Another script for side b.")] = "",
    b_python: Annotated[str, typer.Option("--b-python", help="Another interpreter for side b.")] = "",
    accelerator: Annotated[
        str, typer.Option("--accelerator", help="As of Trainer; by default the script's.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers.")] = 1,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Set the rate of dropout layers to zero.")
    ] = False,
    no_outputs: Annotated[
        bool, typer.Option("--no-outputs", help="Do not record outputs of modules, which needs hooks.")
    ] = False,
    memory: Annotated[str, typer.Option("--memory", help="The most memory of captured batches.")] = "1GiB",
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that each run may take.")] = 600.0,
    keep: Annotated[str, typer.Option("--keep", help="A directory to keep the records in.")] = "",
    page: Annotated[Path | None, typer.Option("--html", help="Also write a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find where two training runs, or two checkpoints, begin to differ, and why."""
    others = list(words or [])
    if not a and not b and not target.endswith(".py"):
        raise typer.Exit(_compare_saved(target, others, page, as_json=as_json))
    sides = {"a": (a, a_options, "", ""), "b": (b, b_options, b_script, b_python)}
    settings: dict[str, Any] = {"steps": steps, "batches": batches, "outputs": not no_outputs}
    settings |= {"accelerator": accelerator, "seed": seed, "no_dropout": no_dropout, "limit": _bytes(memory)}
    result = _run(target, sides, words=others, keep=keep, timeout=timeout, **settings)
    raise typer.Exit(_print(result, page, as_json=as_json))


def _run(target: str, sides: dict[str, tuple[str, list[str] | None, str, str]], **settings: Any) -> Result:
    from nnx_conformance.diff.session import compare_runs
    from nnx_conformance.diff.sides import Side
    from nnx_conformance.options import parse_options

    parsed = {
        name: Side.parse(text or "@1", options=parse_options(options or []), script=script, python=python)
        for name, (text, options, script, python) in sides.items()
    }
    return compare_runs(target, parsed["a"], parsed["b"], progress=print_note, **settings)


def _compare_saved(left: str, others: list[str], page: Path | None, *, as_json: bool) -> int:
    if len(others) != 1:
        raise OptionError(
            f"{left!r} is compared with nothing.",
            remedy="Write `nnx diff train.py --a ddp@1 --b fsdp_auto@2`, or `nnx diff a.ckpt b.ckpt`.",
        )
    right = others[0]
    if any(Path(left).glob("rank*.jsonl")):
        from nnx_conformance.diff.session import compare_records

        return _print(compare_records(Path(left), Path(right)), page, as_json=as_json)
    from nnx_conformance.diff.checkpoints import compare_checkpoints

    return compare_checkpoints(left, right, as_json=as_json)


def _print(result: Result, page: Path | None, *, as_json: bool) -> int:
    """Print a result; return 1 if the runs differ or one failed."""
    from nnx_conformance.diff.page import as_page
    from nnx_conformance.diff.report import as_dict, as_text

    if page is not None:
        page.write_text(as_page(result), encoding="utf-8")
    if as_json:
        print_json(as_dict(result))
    else:
        print_text(as_text(result))
    return int(not result.same)


def _bytes(text: str) -> int:
    from nnx_core.options import bytes_of

    found = bytes_of(text, name="memory")
    assert found is not None
    return found
