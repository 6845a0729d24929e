"""What a plugin's author sees of `StrategyConformance` in pytest."""

from __future__ import annotations

import pytest

from nnx.testing.conformance import all_checks

pytest_plugins = ("pytester",)

CLIPPING = next(check.name for check in all_checks() if check.requires == ("clip_by_norm",))
MODULE = """
from nnx.testing import StrategyConformance

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
    result = pytester.runpytest_inprocess("-k", CLIPPING, "-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(passed=2, failed=1, skipped=1, warnings=1, deselected=4 * (len(all_checks()) - 1))
    promise = next(check.promise for check in all_checks() if check.name == CLIPPING)
    result.stdout.fnmatch_lines(
        [
            f"*TestBreaks.test_promise*{CLIPPING}*",
            promise,
            "*rank 0 of 2*",
            f"*UndeclaredCapability: modest: {CLIPPING} works, although it declares clip_by_norm=False*",
            "SKIPPED*it declares clip_by_norm=False",
        ]
    )


def test_what_only_the_full_profile_tries_is_skipped_unless_asked_for(pytester: pytest.Pytester) -> None:
    rare = next(check.name for check in all_checks() if check.full)
    pytester.makepyfile(
        test_mine="""
        from nnx.testing import StrategyConformance

        class TestMine(StrategyConformance):
            strategy = "tiny"
        """
    )
    result = pytester.runpytest_inprocess("-k", rare, "-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=1, deselected=len(all_checks()) - 1)
    result.stdout.fnmatch_lines(["SKIPPED*only in the full profile"])


def test_a_strategy_that_cannot_be_checked_is_an_error_that_says_why(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="""
        from nnx.testing import StrategyConformance

        class TestMine(StrategyConformance):
            strategy = "tinny"
        """
    )
    result = pytester.runpytest_inprocess("-k", CLIPPING, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, deselected=len(all_checks()) - 1)
    result.stdout.fnmatch_lines(["*StrategyNotFoundError: *tinny*"])
