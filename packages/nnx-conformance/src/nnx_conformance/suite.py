"""The checks as a pytest class that plugins subclass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nnx_conformance.check import Check, Reference
from nnx_conformance.pool import shared_pool
from nnx_conformance.runner import WORKERS, Session, select_checks
from nnx_conformance.subject import Subject


class UndeclaredCapability(UserWarning):
    """A strategy can do what it declares that it cannot."""


class StrategyConformance:
    """Every promise of a strategy as a test of its own, in real processes.

    Subclass it in a test module of the plugin; the class attributes say what is checked::

        from nnx_conformance import StrategyConformance

        class TestMine(StrategyConformance):
            strategy = "mine"

    Attributes:
        strategy: A registered name, or ``"pkg.module:Class"`` of a `Backend` or a Lightning strategy.
        options: Keyword arguments for it.
        imports: Modules to import first in every process.
        accelerator: The accelerator that Trainer and Fabric get; the largest jobs need three devices of it.
        full: True if everything is tried, at every world size.
        one_rank: True if checks run on one rank instead of two; those that take several are skipped.
        only: Names of checks or groups, where not all of them are tried.
    """

    strategy: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    imports: ClassVar[tuple[str, ...]] = ()
    accelerator: ClassVar[str] = "cpu"
    full: ClassVar[bool] = False
    one_rank: ClassVar[bool] = False
    only: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every check that is to be tried; pytest calls this."""
        if "check" in metafunc.fixturenames:
            checks = select_checks(self.only, full=self.full)
            metafunc.parametrize("check", checks, ids=[check.name for check in checks])

    def test_promise(self, check: Check, tmp_path: Path) -> None:
        """Try one check."""
        subject = Subject(
            self.strategy,
            options=self.options,
            imports=tuple(self.imports),
            accelerator=self.accelerator,
        )
        result = _session(subject, full=self.full, ranks=1 if self.one_rank else WORKERS).try_check(
            check, tmp_path
        )
        if result.verdict == "failed":
            pytest.fail(f"{check.promise}\n{result.detail}\n{result.log}".rstrip(), pytrace=False)
        if result.verdict == "skipped":
            pytest.skip(result.detail)
        if result.verdict == "undeclared":
            warnings.warn(
                f"{self.strategy}: {check.name} {result.detail}", UndeclaredCapability, stacklevel=1
            )


@cache
def _session(subject: Subject, *, full: bool, ranks: int) -> Session:
    """The strategy on the workers and the reference results that all suites share."""
    return Session(subject, pool=shared_pool(), reference=_reference(), full=full, ranks=ranks)


@cache
def _reference() -> Reference:
    return Reference(shared_pool())
