"""The plugin that brings the strategy: what it says of itself, and what it costs to ask."""

from __future__ import annotations

import json
import pickle
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from nnx_conformance import scripts
from nnx_conformance.check import Bench, CheckFailed, all_checks, check, expect
from nnx_conformance.launching import run_script
from nnx_conformance.subject import Kind
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import StrategySpec, import_reference

_OF_PLUGINS: tuple[Kind, ...] = ("backend", "strategy")
_LOOK = Path(scripts.__file__).with_name("look.py")


def _spec(bench: Bench) -> StrategySpec:
    """The declaration of an installed plugin; others are not asked for."""
    if bench.identity.owner == "this process":
        bench.not_applicable("it is not declared by an installed distribution")
    return StrategyRegistry.get(bench.subject.name)


@check(kinds=_OF_PLUGINS)
def light_plugin(bench: Bench) -> None:
    """Finding its strategies, and ``nnx list`` and ``nnx show``, import no torch, Lightning or engine."""
    engine = _spec(bench).reference.partition(":")[0]
    code, output, _ = run_script(
        [sys.executable, str(_LOOK), bench.subject.name, engine],
        directory=bench.directory,
        accelerator=bench.subject.accelerator,
        timeout=bench.remaining,
    )
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise CheckFailed(f"`nnx list` and `nnx show` ended with {code} and printed {output!r}.") from None
    codes, imported = found["codes"], found["imported"]
    said = " | ".join(output.splitlines()[:-1])
    expect(codes == [0, 0], f"`nnx list` and `nnx show` ended with {codes}, expected zeros. {said}")
    expect(not imported, f"finding strategies and listing them imported {imported}, which they must not.")


@check(kinds=_OF_PLUGINS)
def described(bench: Bench) -> None:
    """The plugin says in a line each what the strategy is and when to use it."""
    spec = _spec(bench)
    for name, text in (("description", spec.description), ("use_when", spec.use_when)):
        expect(bool(text.strip()), f"{name} is empty.")
        expect("\n" not in text, f"{name} has several lines: {text!r}.")
    expect(
        not spec.docs_url or bool(re.fullmatch(r"https?://\S+|[\w./-]+\.(md|rst|html)", spec.docs_url)),
        f"docs_url={spec.docs_url!r} is neither the address of a page nor its path in the repository.",
    )


@check(kinds=_OF_PLUGINS)
def documented_options(bench: Bench) -> None:
    """Every option is documented: what changes when one turns it."""
    spec = _spec(bench)
    if not spec.options:
        bench.not_applicable("it declares no options")
    options = fields(import_reference(spec.options, what=bench.subject.strategy))
    bare = [option.name for option in options if not str(option.metadata.get("help", "")).strip()]
    expect(
        not bare, f"options {bare} have no help; declare them with nnx_core.options.option(..., help=...)."
    )


@check(kinds=_OF_PLUGINS)
def declared_options(bench: Bench) -> None:
    """The options that the plugin declares for ``nnx show`` are those that the engine takes."""
    spec = _spec(bench)
    taken: Any = getattr(spec.resolve(), "Options", None)
    if taken is None:
        bench.not_applicable("its class has no Options")
    names = [option.name for option in fields(taken)]
    shown = fields(import_reference(spec.options, what=bench.subject.strategy)) if spec.options else ()
    told = [option.name for option in shown]
    expect(told == names, f"the spec's options {spec.options!r} are {told}, the engine takes {names}.")


@check(kinds=_OF_PLUGINS)
def declared_refusals(bench: Bench) -> None:
    """The habits that the plugin declares as refused are habits that the suite knows."""
    known = {one.name for one in all_checks() if one.refusable}
    unknown = sorted(set(_spec(bench).capabilities.refuses) - known)
    expect(not unknown, f"refuses={unknown}, which `nnx conformance --list` does not have as habits.")


@check(kinds=_OF_PLUGINS)
def portable_spec(bench: Bench) -> None:
    """The declaration is data: it can be pickled, and shown as JSON."""
    spec = _spec(bench)
    try:
        copy = pickle.loads(pickle.dumps(spec))
        json.dumps(spec.as_dict())
    except Exception as error:
        raise CheckFailed(f"the spec is not plain data: {type(error).__name__}: {error}.") from error
    expect(copy == spec, f"the spec comes back from a pickle as {copy}, expected {spec}.")
