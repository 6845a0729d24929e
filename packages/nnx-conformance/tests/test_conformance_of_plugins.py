"""The checks of whole plugins, on pretend distributions: a correct one, and one for each fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnx_conformance import Subject
from nnx_conformance.check import Bench, CheckFailed, NotApplicable, Reference, all_checks
from nnx_conformance.pool import WorkerPool
from nnx_conformance.subject import Identity
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import Capabilities

CHECKS = {check.name: check for check in all_checks()}
OF_PLUGINS = (
    *(
        "listing_imports_no_torch",
        "spec_has_description",
        "options_documented",
        "options_match_engine",
        "refuses_known_checks",
    ),
    "spec_is_plain_data",
)

PLUGIN = """
    from nnx import StrategySpec, hookimpl
    {imports}

    @hookimpl
    def nnx_strategies():
        return [StrategySpec({arguments})]
"""
IN_ORDER = {
    "name": "acme",
    "target": "acme_engine:Engine",
    "description": "An engine",
    "use_when": "you want it",
    "docs_url": "https://acme.example/docs",
    "options": "acme_options:Options",
}
OPTIONS = """
    from dataclasses import dataclass
    from nnx_core.options import option

    @dataclass(frozen=True, kw_only=True)
    class Options:
        bucket_megabytes: float = option(25.0, help={help!r})
"""
ENGINE = """
    from acme_options import Options
    from nnx_core.backend import NoOptions
    from nnx_tiny.backend import TinyBackend

    class Engine(TinyBackend):
        Options = {options}
"""
LIGHT = """
    def __getattr__(name):
        import acme_engine

        return getattr(acme_engine, name)
"""
Install = Callable[..., None]


@pytest.fixture
def install(site: Any) -> Install:
    """Install the distribution `acme`, with the given files in place of correct ones."""

    def run(
        imports: str = "", help: str = "As in the original.", options: str = "Options", **other: Any
    ) -> None:
        spec = {**IN_ORDER, **other}
        arguments = ", ".join(
            f"{key}={value if key == 'init_params' else repr(value)}" for key, value in spec.items()
        )
        modules = {
            "acme_light": LIGHT,
            "acme_options": OPTIONS.format(help=help),
            "acme_engine": ENGINE.format(options=options),
        }
        site.add("acme", PLUGIN.format(imports=imports, arguments=arguments), modules=modules)

    return run


def bench(directory: Path, pool: Any = None) -> Bench:
    """Return the bench for checks of the installed distribution."""
    spec = StrategyRegistry.get("acme")
    identity = Identity("backend", spec.capabilities, StrategyRegistry.owner("acme"), spec.reference)
    return Bench(Subject("acme"), identity, pool=pool, reference=Reference(pool), directory=directory)


@pytest.mark.full
def test_a_plugin_that_is_in_order_passes(install: Install, tmp_path: Path) -> None:
    install()
    for name in OF_PLUGINS:
        CHECKS[name].run(bench(tmp_path))


@pytest.mark.quick(every=9)
@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ({"imports": "import torch"}, "listing_imports_no_torch", r"ended with \[0, 2\].*nnx doctor"),
        (
            {"imports": "import acme_light", "target": "acme_light:Engine"},
            "listing_imports_no_torch",
            r"imported \['acme_light'\]",
        ),
        ({"description": ""}, "spec_has_description", "description is empty"),
        ({"use_when": " "}, "spec_has_description", "use_when is empty"),
        ({"use_when": "one\ntwo"}, "spec_has_description", "several lines"),
        ({"docs_url": "see the wiki"}, "spec_has_description", "docs_url='see the wiki'"),
        ({"help": ""}, "options_documented", r"options \['bucket_megabytes'\] have no help"),
        (
            {"options": "NoOptions"},
            "options_match_engine",
            r"the engine takes \[\]",
        ),
        (
            {"imports": "from nnx import Capabilities", "capabilities": Capabilities(refuses=("lfbgs",))},
            "refuses_known_checks",
            r"refuses=\['lfbgs'\]",
        ),
        ({"init_params": "{'bucket_megabytes': lambda: 1}"}, "spec_is_plain_data", "not plain data"),
    ],
)
def test_a_fault_of_a_plugin_is_caught_by_the_check_that_names_it(
    install: Install, tmp_path: Path, fault: dict[str, Any], check: str, message: str
) -> None:
    install(**fault)
    with pytest.raises(CheckFailed, match=message):
        CHECKS[check].run(bench(tmp_path))
    for other in OF_PLUGINS[1:]:  # the first takes a process
        if other != check:
            CHECKS[other].run(bench(tmp_path))


@pytest.mark.full
def test_an_engine_that_is_imported_together_with_lightning_is_noticed(
    install: Install, tmp_path: Path
) -> None:
    install(imports="import acme_light", target="acme_light:Engine")
    with pytest.raises(CheckFailed, match="Lightning imported acme_light"):
        CHECKS["name_known_without_import"].run(bench(tmp_path))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", [*OF_PLUGINS, "name_known_without_import"])
def test_a_class_that_no_distribution_declares_is_not_asked(
    pool: WorkerPool, name: str, tmp_path: Path
) -> None:
    target = "nnx_tiny.backend:TinyBackend"
    identity = Identity("backend", Capabilities(), "this process", target)
    asked = Bench(Subject(target), identity, pool=pool, reference=Reference(pool), directory=tmp_path)
    with pytest.raises(NotApplicable, match="distribution"):
        CHECKS[name].run(asked)
