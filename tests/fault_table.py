"""Every planted fault against the whole fast profile of the conformance suite, as a table in Markdown.

    python tests/fault_table.py [--only FAULT] [--group GROUP] [--own-group] [--wide]

`test_planted_faults.py` runs a few checks for each fault; this runs all, which takes about a minute each.
`--own-group` runs only the checks of the group that catches the fault, which takes some ten seconds.
A check that the unbroken strategy fails too does not count. Wide faults run on their own check only, unless
`--wide` is given. The exit code is 1 if a fault was not caught, or if a narrow one failed a check that it
does not name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from faults import Fault, all_faults
from nnx_conformance import Subject
from nnx_conformance.check import Reference, all_checks
from nnx_conformance.pool import PRELOAD, WorkerPool
from nnx_conformance.runner import Session, select_checks
from nnx_core.names.registry import StrategyRegistry

CHECKS = {check.name: check for check in all_checks()}
FAST = [check.name for check in select_checks()]


class FaultRunner:
    """The workers, and the checks that the unbroken strategies fail."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.reference = Reference(pool)
        self.healthy: dict[Subject, set[str]] = {}

    def failures(self, subject: Subject, names: Iterable[str]) -> set[str]:
        """Names of the checks that fail on a strategy."""
        session = Session(subject, pool=self.pool, reference=self.reference)
        failed = set()
        for name in names:
            with tempfile.TemporaryDirectory(prefix="nnx-fault-") as directory:
                if session.try_check(CHECKS[name], Path(directory)).verdict == "failed":
                    failed.add(name)
        return failed

    def failures_without_the_fault(self, fault: Fault, names: Iterable[str]) -> set[str]:
        """Those of the checks that fail on the strategy that was broken as well."""
        base = Subject(unbroken(fault))
        if base not in self.healthy:
            self.healthy[base] = self.failures(base, FAST)
        return self.healthy[base] & set(names)


def unbroken(fault: Fault) -> str:
    """The class that the fault was planted in: the first one up its line that is not a fault."""
    subject = fault.subject()
    subject.prepare()
    line = StrategyRegistry.get(subject.name).resolve().__mro__
    base = next(cls for cls in line if cls.__module__.partition(".")[0] not in ("faults", "jobs"))
    return f"{base.__module__}:{base.__qualname__}"


def to_try(fault: Fault, *, wide: bool, own_group: bool) -> list[str]:
    """Return the checks to run on a fault, its own first."""
    if not (fault.is_narrow or wide):
        return [fault.caught_by]
    group = CHECKS[fault.caught_by].group
    others = [name for name in FAST if not own_group or CHECKS[name].group == group]
    return list(dict.fromkeys([fault.caught_by, *others]))


def examine(runner: FaultRunner, fault: Fault, names: Iterable[str]) -> tuple[str, bool]:
    """Return one row of the table, and True if the results are those of the fault's description."""
    started = time.monotonic()
    failed = runner.failures(fault.subject(), names)
    caught, others = fault.caught_by in failed, failed - {fault.caught_by}
    if others:
        others -= runner.failures_without_the_fault(fault, others)
    surprises = others - set(fault.also) if fault.is_narrow else set()
    cells = [
        fault.name,
        unbroken(fault).rpartition(":")[2],
        f"{fault.caught_by}{'' if caught else ' **NOT CAUGHT**'}",
        "(wide)" if not fault.is_narrow else ", ".join(sorted(others - surprises)) or "nothing",
        ", ".join(f"**{name}**" for name in sorted(surprises)),
        f"{time.monotonic() - started:.0f}",
    ]
    return f"| {' | '.join(cells)} |", caught and not surprises


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="part of a fault's name; may be repeated")
    parser.add_argument(
        "--group", action="append", default=[], help="faults that this group of checks catches"
    )
    parser.add_argument("--own-group", action="store_true", help="only the checks of the fault's own group")
    parser.add_argument("--wide", action="store_true", help="try wide faults on every check too")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in all_faults()
        if (not arguments.only or any(part in fault.name for part in arguments.only))
        and (not arguments.group or CHECKS[fault.caught_by].group in arguments.group)
    ]
    if not chosen:
        parser.error("there is no such fault")
    print(
        "| fault | planted in | caught by | what it names failed too | what it does not name | s |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    wrong = 0
    with WorkerPool(size=3, preload=PRELOAD) as pool:
        runner = FaultRunner(pool)
        for fault in chosen:
            names = to_try(fault, wide=arguments.wide, own_group=arguments.own_group)
            row, is_right = examine(runner, fault, names)
            wrong += not is_right
            print(row, flush=True)
        for base, failed in runner.healthy.items():
            print(f"\n{base.strategy} by itself fails: {', '.join(sorted(failed)) or 'nothing'}")
    print(f"\n{len(chosen) - wrong} of {len(chosen)} faults are caught as they say.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
