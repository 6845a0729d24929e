"""The checks as a pytest class for plugins to subclass."""

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
    """A strategy has a capability that it declares false."""


class StrategyConformance:
    """Tests every promise of a strategy, in real processes.

    Subclass it in a test module of the plugin, and set class attributes::

        from nnx_conformance import StrategyConformance

        class TestMine(StrategyConformance):
            strategy = "mine"

    Attributes:
        strategy: A registered name, or ``"pkg.module:Class"`` of a `Backend` or a Lightning strategy.
        options: Keyword arguments of the strategy.
        imports: Modules to import first in every process.
        accelerator: The accelerator of Trainer and Fabric; the largest jobs need three devices.
        full: True to run all checks, at every world size.
        one_rank: True to run checks on one rank instead of two, and to skip checks of several ranks.
        only: Names of checks or groups to run; all by default.
    """

    strategy: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    imports: ClassVar[tuple[str, ...]] = ()
    accelerator: ClassVar[str] = "cpu"
    full: ClassVar[bool] = False
    one_rank: ClassVar[bool] = False
    only: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every selected check; pytest calls this."""
        if "check" in metafunc.fixturenames:
            checks = select_checks(self.only, full=self.full)
            metafunc.parametrize("check", checks, ids=[check.name for check in checks])

    def test_promise(self, check: Check, tmp_path: Path) -> None:
        """Run one check."""
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
    """Return a session on the shared workers and reference results."""
    return Session(subject, pool=shared_pool(), reference=_reference(), full=full, ranks=ranks)


@cache
def _reference() -> Reference:
    return Reference(shared_pool())
