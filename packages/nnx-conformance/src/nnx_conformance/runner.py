"""Select checks, run them on a strategy, and report the verdicts.

`nnx conformance` and `StrategyConformance` both use `Session`.
"""

from __future__ import annotations

import importlib
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nnx_conformance.check import (
    Bench,
    Check,
    CheckFailed,
    NotApplicable,
    NumbersDiffer,
    Reference,
    Refused,
    all_checks,
    exception_in,
    missing_capability,
)
from nnx_conformance.pool import PRELOAD, JobError, WorkerPool
from nnx_conformance.report import Report, Result, Verdict
from nnx_conformance.subject import Identity, Subject
from nnx_core.errors import NnxError, OptionError
from nnx_core.names.registry import StrategyRegistry

__all__ = [
    "Session",
    "run_conformance",
    "select_checks",
]


WORKERS = 3
"""Number of ranks of the largest job."""
_DISTRIBUTIONS = ("nnx-core", "torch", "lightning")


class Session:
    """One strategy on one set of workers.

    Args:
        subject: The strategy.
        pool: At least as many workers as `ranks`.
        reference: Results of one plain process, shared by sessions on the same workers.
        full: True to run checks at every world size.
        ranks: Largest number of ranks; checks that need more are skipped.

    Raises:
        NnxError: The strategy cannot be found or imported.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        pool: WorkerPool,
        reference: Reference | None = None,
        full: bool = False,
        ranks: int = WORKERS,
    ) -> None:
        self.subject = subject
        self.full = full
        self.ranks = ranks
        self._pool = pool
        self._reference = reference or Reference(pool)
        self.identity = self._identify()

    def try_check(self, check: Check, directory: Path) -> Result:
        """Run one check.

        Args:
            check: The check to run.
            directory: An empty directory for the check.
        """
        started = time.monotonic()
        verdict, detail, log = self._verdict(check, directory)
        return Result(
            check=check.name,
            group=check.group,
            promise=check.promise,
            verdict=verdict,
            detail=detail,
            seconds=round(time.monotonic() - started, 2),
            log=log,
        )

    def _verdict(self, check: Check, directory: Path) -> tuple[Verdict, str, str]:
        """Run a check and return its verdict, a one-line reason, and the log of a failure."""
        identity = self.identity
        if identity.kind not in check.kinds:
            return "skipped", f"does not apply to a {_KINDS[identity.kind]}", ""
        missing = [m for r in check.requires if (m := missing_capability(identity.capabilities, r))]
        declared = f"the strategy declares {', '.join(missing)}"
        try:
            self._run(check, directory)
        except NotApplicable as reason:
            return "skipped", str(reason), ""
        except Refused as refusal:
            is_declared = bool(missing) or check.name in identity.capabilities.refuses
            how = "as declared" if is_declared else "but not declared in `refuses`"
            return "skipped" if is_declared else "failed", f"refused, {how}: {refusal}", ""
        except CheckFailed as failure:
            if isinstance(failure, NumbersDiffer) and not identity.capabilities.exact:
                return "skipped", f"the strategy declares exact=False: {failure}", ""
            return ("skipped", declared, "") if missing else ("failed", str(failure), _log(failure))
        if check.name in identity.capabilities.refuses:
            missing, declared = [check.name], f"the strategy declares refuses={check.name!r}"
        return ("undeclared", f"works, although {declared}", "") if missing else ("passed", "", "")

    def _run(self, check: Check, directory: Path) -> None:
        bench = Bench(
            self.subject,
            self.identity,
            pool=self._pool,
            reference=self._reference,
            directory=directory,
            full=self.full,
            ranks=self.ranks,
            deadline=check.deadline,
        )
        try:
            check.run(bench)
        except (CheckFailed, NotApplicable, Refused):
            raise
        except JobError as error:
            reason = exception_in(next(iter(error.failures.values())))
            raise CheckFailed(f"the reference (one plain process) fails: {reason}") from error
        except Exception as error:
            raise CheckFailed(f"{type(error).__name__}: {error}") from error

    def _identify(self) -> Identity:
        if not (self.subject.is_lightning or self.subject.imports or ":" in self.subject.strategy):
            StrategyRegistry.get(self.subject.strategy)  # explains a wrong name before workers start
        try:
            found: Identity = self._pool.run(_identify, self.subject, world_size=self.ranks)[0]
        except JobError as error:
            reason = exception_in(next(iter(error.failures.values())))
            raise NnxError(
                f"{self.subject.strategy!r} cannot be checked: {reason}",
                remedy="`nnx list` has the names, and `nnx show NAME` the options.",
            ) from error
        return found


_KINDS = {
    "backend": "Backend",
    "strategy": "raw Lightning strategy",
    "lightning": "strategy of Lightning itself",
}


def run_conformance(
    subject: Subject,
    *,
    full: bool = False,
    only: Iterable[str] = (),
    ranks: int = WORKERS,
    report_start: Callable[[Check], None] = lambda check: None,
    report_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Check a strategy in new worker processes.

    Args:
        subject: The strategy.
        full: Run all checks, at every world size.
        only: Names of checks or groups; all by default.
        ranks: Largest number of ranks, 1 to 3; checks that need more are skipped.
        report_start: Called before each check.
        report_result: Called after each check.

    Raises:
        NnxError: The strategy cannot be found or imported, or a check does not exist.

    Example:
        >>> report = run_conformance(Subject("ddp"), only=["losses_float64"])  # doctest: +SKIP
        >>> report.summary()  # doctest: +SKIP
        '1 passed'
    """
    started = time.monotonic()
    checks = select_checks(only, full=full)
    results = []
    with (
        WorkerPool(size=ranks, preload=PRELOAD) as pool,
        tempfile.TemporaryDirectory(prefix="nnx-conformance-") as top,
    ):
        session = Session(subject, pool=pool, full=full, ranks=ranks)
        for check in checks:
            directory = Path(top) / check.name
            directory.mkdir()
            report_start(check)
            results.append(session.try_check(check, directory))
            report_result(results[-1])
    return Report(
        strategy=subject.strategy,
        kind=session.identity.kind,
        owner=session.identity.owner,
        target=session.identity.target,
        profile="full" if full else "fast",
        versions={"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}},
        results=results,
        seconds=round(time.monotonic() - started, 1),
    )


def select_checks(only: Iterable[str] = (), *, full: bool = False) -> list[Check]:
    """Return the checks of a profile, or the named checks.

    Args:
        only: Names of groups, or of checks of either profile.
        full: Include the checks that the fast profile skips.

    Raises:
        OptionError: No check or group has this name.

    Example:
        >>> [check.name for check in select_checks(["losses_float64"])]
        ['losses_float64']
    """
    checks = all_checks()
    wanted = set(only)
    known = {check.name for check in checks} | {check.group for check in checks}
    for name in sorted(wanted - known):
        near = get_close_matches(name, sorted(known), n=1)
        raise OptionError(
            f"there is no check or group {name!r}.",
            remedy=f"Did you mean {near[0]!r}?" if near else "See `nnx conformance --list`.",
        )
    in_profile = [check for check in checks if full or not check.full or check.name in wanted]
    if not wanted:
        return in_profile
    return [check for check in in_profile if check.name in wanted or check.group in wanted]


def _identify(subject: Subject) -> Identity:
    importlib.import_module("lightning.pytorch")  # before the first check, to measure its seconds alone
    identity = subject.identify()
    subject.flag()  # refuses wrong options once, before the checks
    return identity


def _log(failure: CheckFailed) -> str:
    """Return tracebacks and output of the ranks, or the traceback of the check itself."""
    cause = failure.__cause__
    if cause is None:
        return ""
    return str(cause) if isinstance(cause, JobError) else "".join(traceback.format_exception(cause))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
