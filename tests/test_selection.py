"""The markers that select tests, and the conformance checks that the default run tries by them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from nnx_conformance import StrategyConformance
from nnx_conformance.check import all_checks
from nnx_conformance.runner import select_checks
from nnx_test_helpers.selection import DEFAULT, Quick

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[1]
MODULE = """
import pytest

@pytest.mark.quick(every=3, first=1)
@pytest.mark.parametrize("number", [pytest.param(9, marks=pytest.mark.full), *range(7)])
def test_cases(number): ...

@pytest.mark.full
@pytest.mark.quick(every=2)
@pytest.mark.parametrize("number", [0, 1])
def test_full(number): ...

def test_plain(): ...
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", DEFAULT), ["test_cases[1]", "test_cases[4]", "test_plain"]),
        (
            ("-m", "full"),
            [*(f"test_cases[{number}]" for number in (9, 0, 2, 3, 5, 6)), *("test_full[0]", "test_full[1]")],
        ),
        (("-m", DEFAULT, "test_it.py::test_full"), ["test_full[0]", "test_full[1]"]),
        (("-m", "full", "test_it.py::test_plain"), []),
    ],
    ids=["by default", "the rest", "by its name", "by its name and a marker"],
)
def test_a_run_selects_by_markers_and_names(
    pytester: pytest.Pytester, arguments: tuple[str, ...], expected: list[str]
) -> None:
    pytester.makepyfile(test_it=MODULE)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    assert [line.partition("::")[2] for line in result.outlines if "::" in line] == expected


def suites() -> Iterator[tuple[type[StrategyConformance], Quick | None]]:
    """Yield each conformance class that the default run tries, and the arguments of its marker `quick`."""
    for path in sorted(ROOT.glob("*/*/tests/**/test_conformance.py")):
        spec = spec_from_file_location(f"suite_of_{path.parts[-3]}", path)
        assert spec and spec.loader
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except pytest.skip.Exception:
            continue  # its engine is not installed
        for suite in vars(module).values():
            if (
                isinstance(suite, type)
                and issubclass(suite, StrategyConformance)
                and suite.__module__ == spec.name
            ):
                marks = {mark.name: mark for mark in getattr(suite, "pytestmark", [])}
                if "full" not in marks:
                    yield suite, Quick(**marks["quick"].kwargs) if "quick" in marks else None


def test_by_default_every_check_of_the_fast_profile_but_user_patterns_is_tried_somewhere() -> None:
    others = ("ddp", "nnx_deepspeed", "fairscale")  # Lightning's own, and engines that may be absent
    tried = {
        check.name
        for suite, quick in suites()
        if not suite.strategy.startswith(others)
        for check in select_checks(suite.only)
        if quick is None or quick.has_check(check)
    }
    left = [
        check.name for check in select_checks() if check.group != "user_patterns" and check.name not in tried
    ]
    assert left == []


def test_the_names_of_a_marker_are_checks_that_its_class_tries_and_groups() -> None:
    groups = {name for check in all_checks() for name in (check.group, check.module)}
    for suite, quick in suites():
        if quick:
            known = {check.name for check in select_checks(suite.only)}
            assert [name for name in quick.checks if name not in known] == [], suite
            assert [name for name in quick.groups if name not in groups] == [], suite


def test_workers_take_the_files_in_the_order_of_testpaths(request: pytest.FixtureRequest) -> None:
    assert not request.config.getoption("loadscopereorder", False)
