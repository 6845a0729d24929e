"""`StrategyConformance` as plugin authors use it in pytest."""

from __future__ import annotations

import pytest

from nnx_conformance.check import all_checks
from nnx_conformance.runner import select_checks
from nnx_conformance.suite import UndeclaredCapability

pytest_plugins = ("pytester",)

FAST = select_checks()
CLIPPING = next(check.name for check in all_checks() if check.requires == ("clip_by_norm",))
MODULE = """
from nnx_conformance import StrategyConformance

class TestPasses(StrategyConformance):
    strategy = "tiny"
    options = {"bucket_megabytes": 0.001}

class TestBreaks(StrategyConformance):
    strategy = "jobs.conformance_names:ForgetsClipping"

class TestAdmits(StrategyConformance):
    strategy = "forgetful"
    imports = ("jobs.conformance_names",)

class TestIsModest(StrategyConformance):
    strategy = "modest"
    imports = ("jobs.conformance_names",)
"""


def test_each_promise_is_a_test_that_passes_fails_skips_or_warns(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=MODULE)
    # In this process, so that the workers are shared.
    shown = f"always::{UndeclaredCapability.__module__}.UndeclaredCapability"  # under any PYTHONWARNINGS
    result = pytester.runpytest_inprocess("-k", CLIPPING, "-p", "no:cacheprovider", "-rs", "-W", shown)
    result.assert_outcomes(passed=2, failed=1, skipped=1, warnings=1, deselected=4 * (len(FAST) - 1))
    promise = next(check.promise for check in all_checks() if check.name == CLIPPING)
    result.stdout.fnmatch_lines(
        [
            f"*TestBreaks.test_promise*{CLIPPING}*",
            promise,
            "*rank 0 of 2*",
            f"*UndeclaredCapability: modest: {CLIPPING} works, although*declares clip_by_norm=False*",
            "SKIPPED*the strategy declares clip_by_norm=False",
        ]
    )


def test_a_class_chooses_what_is_tried(pytester: pytest.Pytester) -> None:
    rare = next(check.name for check in all_checks() if check.full)
    pytester.makepyfile(
        test_mine=f"""
        from nnx_conformance import StrategyConformance

        class TestFast(StrategyConformance):
            strategy = "tiny"

        class TestFull(StrategyConformance):
            strategy = "tiny"
            full = True

        class TestGroup(StrategyConformance):
            strategy = "tiny"
            only = ("stages", "{rare}")
        """
    )
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider")
    collected = [line for line in result.outlines if "::" in line]
    names = {
        suite: {line.rpartition("[")[2].rstrip("]") for line in collected if f"::{suite}::" in line}
        for suite in ("TestFast", "TestFull", "TestGroup")
    }
    assert names["TestFast"] == {check.name for check in FAST}
    assert names["TestFull"] == {check.name for check in all_checks()}
    assert names["TestGroup"] == {check.name for check in FAST if check.group == "stages"} | {rare}


def test_a_strategy_that_cannot_be_checked_is_an_error_that_says_why(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="""
        from nnx_conformance import StrategyConformance

        class TestMine(StrategyConformance):
            strategy = "tinny"
        """
    )
    result = pytester.runpytest_inprocess("-k", CLIPPING, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, deselected=len(FAST) - 1)
    result.stdout.fnmatch_lines(["*StrategyNotFoundError: *tinny*"])
