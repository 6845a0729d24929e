"""The plugin declares the strategy completely, as plain data, and cheap to list."""

from __future__ import annotations

import json
import pickle
import re
import sys
from dataclasses import fields
from typing import Any

from nnx_conformance.check import Bench, CheckFailed, all_checks, check, expect
from nnx_conformance.checks.lifecycle.launch import SCRIPTS, run_script
from nnx_conformance.subject import Kind
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import StrategySpec, import_reference

_OF_PLUGINS: tuple[Kind, ...] = ("backend", "strategy")


def _spec(bench: Bench) -> StrategySpec:
    """Return the spec of an installed plugin; skip the check for a class without a plugin."""
    if bench.identity.owner == "this process":
        bench.not_applicable("no installed distribution declares it")
    return StrategyRegistry.get(bench.subject.name)


@check(kinds=_OF_PLUGINS)
def listing_imports_no_torch(bench: Bench) -> None:
    """Plugin discovery, ``nnx list`` and ``nnx show`` import neither torch, nor Lightning, nor the engine."""
    engine = _spec(bench).reference.partition(":")[0]
    code, output, _ = run_script(
        [sys.executable, str(SCRIPTS / "list_and_show.py"), bench.subject.name, engine],
        directory=bench.directory,
        accelerator=bench.subject.accelerator,
        timeout=bench.remaining,
    )
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise CheckFailed(f"`nnx list` and `nnx show` ended with {code} and printed {output!r}.") from None
    codes, imported = found["codes"], found["imported"]
    printed = " | ".join(output.splitlines()[:-1])
    expect(codes == [0, 0], f"`nnx list` and `nnx show` ended with {codes}, expected zeros. {printed}")
    expect(not imported, f"finding and listing strategies imported {imported}, expected none of them.")


@check(kinds=_OF_PLUGINS)
def spec_has_description(bench: Bench) -> None:
    """The plugin has a one-line description of the strategy and a one-line ``use_when``."""
    spec = _spec(bench)
    for name, text in (("description", spec.description), ("use_when", spec.use_when)):
        expect(bool(text.strip()), f"{name} is empty.")
        expect("\n" not in text, f"{name} has several lines: {text!r}.")
    expect(
        not spec.docs_url or bool(re.fullmatch(r"https?://\S+|[\w./-]+\.(md|rst|html)", spec.docs_url)),
        f"docs_url={spec.docs_url!r} is neither the address of a page nor its path in the repository.",
    )


@check(kinds=_OF_PLUGINS)
def options_documented(bench: Bench) -> None:
    """Every option has a help text."""
    spec = _spec(bench)
    if not spec.options:
        bench.not_applicable("it declares no options")
    options = fields(import_reference(spec.options, what=bench.subject.strategy))
    bare = [option.name for option in options if not str(option.metadata.get("help", "")).strip()]
    expect(
        not bare, f"options {bare} have no help; declare them with nnx_core.options.option(..., help=...)."
    )


@check(kinds=_OF_PLUGINS)
def options_match_engine(bench: Bench) -> None:
    """The options that the plugin declares for ``nnx show`` are the options of the engine."""
    spec = _spec(bench)
    taken: Any = getattr(spec.resolve(), "Options", None)
    if taken is None:
        bench.not_applicable("its class has no Options")
    names = [option.name for option in fields(taken)]
    shown = fields(import_reference(spec.options, what=bench.subject.strategy)) if spec.options else ()
    declared = [option.name for option in shown]
    expect(
        declared == names, f"the spec's options {spec.options!r} are {declared}, the engine takes {names}."
    )


@check(kinds=_OF_PLUGINS)
def refuses_known_checks(bench: Bench) -> None:
    """Every name in ``refuses`` is a check of a user pattern."""
    known = {one.name for one in all_checks() if one.refusable}
    unknown = sorted(set(_spec(bench).capabilities.refuses) - known)
    expect(
        not unknown, f"refuses={unknown}, which are no checks of user patterns; see `nnx conformance --list`."
    )


@check(kinds=_OF_PLUGINS)
def spec_is_plain_data(bench: Bench) -> None:
    """The spec is plain data: it can be pickled, and shown as JSON."""
    spec = _spec(bench)
    try:
        copy = pickle.loads(pickle.dumps(spec))
        json.dumps(spec.as_dict())
    except Exception as error:
        raise CheckFailed(f"the spec is not plain data: {type(error).__name__}: {error}.") from error
    expect(copy == spec, f"the unpickled spec is {copy}, expected {spec}.")
