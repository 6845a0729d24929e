"""Run both sides from one state on one global batch, compare them, and run again for the culprit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from nnx_conformance.diff.comparison import Comparer, Comparison, Finding, why_no_twin
from nnx_conformance.diff.job import Job
from nnx_conformance.diff.record import RecordError, Run, no_step, read_run
from nnx_conformance.diff.recorder import Wanted
from nnx_conformance.diff.sides import Side, run_side
from nnx_conformance.diff.verdict import Verdict, judge, wanted_whole
from nnx_core.errors import OptionError


@dataclass
class Result:
    """The result of a comparison.

    Attributes:
        a: The first run.
        b: The second run.
        compared: The comparison.
        verdict: The verdict; None if the runs agree as far as they went.
        notes: Sentences about the runs.
    """

    a: Run
    b: Run
    compared: Comparison
    verdict: Verdict | None
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """True if both runs finished and agree."""
        return self.verdict is None and not self.a.error and not self.b.error


def compare_runs(
    script: str,
    a: Side,
    b: Side,
    *,
    words: Sequence[str] = (),
    keep: str = "",
    timeout: float = 600.0,
    progress: Callable[[str], None] = lambda text: None,
    **settings: object,
) -> Result:
    """Run a script on both sides, and compare the runs.

    Args:
        script: The script.
        a: The first side, the reference.
        b: The second side.
        words: The arguments of the script.
        keep: A directory to keep the records in; by default they are deleted.
        timeout: The seconds that each run may take.
        progress: Called with what happens now.
        settings: Further fields of `Job`.

    Raises:
        RecordError: A run recorded no step.
    """
    with _directory(keep) as place:
        job = Job(
            directory="",
            capture=str(place / "captured"),
            script=script,
            words=list(words),
            **settings,  # type: ignore[arg-type]
        )

        def run(name: str, side: Side, **changes: object) -> Run:
            progress(f"{name}: {side}")
            changed = replace(job, directory=str(place / name), **changes)  # type: ignore[arg-type]
            return run_side(side, changed, name=str(side), timeout=timeout)

        first = run("a", a, captures=True)
        if first.error and not first.finished:
            raise no_step(str(a), first.error)
        notes: list[str] = []
        twin = _twin(run, a, first, notes)
        second = run("b", b)
        notes = [*note_ends(first, second), *notes]
        compared = Comparer(first, second, twin).compare()

        def again(finding: Finding, wanted: Sequence[Wanted]) -> tuple[Path, Path]:
            exact, steps = a if twin is None else a.twin, finding.step + 1
            shares = max(*(count for _, count in second.shares.values()), len(second.shares))
            explain = (finding.step, finding.kind, finding.origin.name, shares)
            right = run("a whole", exact, whole=wanted, explain=explain, steps=steps)
            return right.directory, run("b whole", b, whole=wanted, steps=steps).directory

        return Result(first, second, compared, find_verdict(first, second, compared, again), notes)


def find_verdict(
    a: Run, b: Run, compared: Comparison, again: Callable[[Finding, Sequence[Wanted]], tuple[Path, Path]]
) -> Verdict | None:
    """Return the verdict on a comparison, after a second run of both sides; None if the runs agree.

    Args:
        a: The first run.
        b: The second run.
        compared: The comparison.
        again: Runs both sides again, with some tensors whole; returns the directories of the records.
    """
    finding = compared.finding
    if finding is None:
        return None
    wanted = wanted_whole(finding)
    if not wanted:
        return judge(a, b, compared)
    whole = again(finding, wanted)
    own = Comparer(b, read_run(whole[1], b.name), None, by_rank=True).compare().finding
    if own is not None and own.step <= finding.step:
        return _undetermined(own, finding)
    return judge(a, b, compared, whole=whole)


def compare_records(left: Path, right: Path) -> Result:
    """Compare the records in two directories, without runs."""
    a, b = read_run(left, str(left)), read_run(right, str(right))
    missing = sorted(set(a.facts.get("parameters", ())) ^ set(b.facts.get("parameters", ())))
    if missing:
        raise OptionError(
            f"the models differ: {', '.join(missing[:6])} on one side only.",
            remedy="Compare runs of one model.",
        )
    compared = Comparer(a, b, None).compare()
    return Result(
        a, b, compared, judge(a, b, compared), ["Tolerances are those of the precision, not of a twin."]
    )


def note_ends(first: Run, second: Run) -> list[str]:
    """Say which run ended early; a script that ends by itself must do so on both sides."""
    notes = []
    most = max(first.finished, second.finished)
    for letter, run in (("a", first), ("b", second)):
        if not run.error and run.finished < most:
            run.error = f"the script ended after {run.finished} steps, and the other side's after {most}"
        if run.error:
            notes.append(f"Run {letter} ended early: {run.error.rstrip('.')}.")
    return notes


def _twin(run: Callable[..., Run], a: Side, first: Run, notes: list[str]) -> Run | None:
    """Run the float64 twin; None, and a note, if it fails or computes something else."""
    try:
        twin = run("twin", a.twin)
        why = twin.error or why_no_twin(first, twin)
        if not why:
            return twin
    except RecordError as error:
        why = error.message
    notes.append(
        f"There is no float64 twin of run a, so tolerances are those of its precision: {why.rstrip('.')}."
    )
    return None


def _undetermined(own: Finding, finding: Finding) -> Verdict:
    detail = f"of run b differs between two runs of it by {own.origin.size:.2g} of its norm"
    evidence = [f"Run a and run b differ by {finding.origin.size:.2g} in {finding.origin.name}."]
    return Verdict(own.step, own.origin.name, own.kind, "not deterministic", detail, evidence=evidence)


@contextmanager
def _directory(keep: str) -> Iterator[Path]:
    if keep:
        path = Path(keep)
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nnx-diff-") as made:
        yield Path(made)
