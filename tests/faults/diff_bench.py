"""Compare runs of a model in warm processes, with one plain process, as ``nnx diff`` compares scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faults.diff import Planted
from faults.diff_models import STEPS, Model, record_run
from nnx_conformance.diff.comparison import Comparer, Comparison, Finding
from nnx_conformance.diff.job import Job
from nnx_conformance.diff.record import Run, read_run
from nnx_conformance.diff.recorder import Wanted
from nnx_conformance.diff.session import find_verdict
from nnx_conformance.diff.verdict import Verdict
from nnx_conformance.pool import WorkerPool
from nnx_conformance.subject import Subject


@dataclass
class Bench:
    """Runs the comparisons of one model in the processes of a pool.

    Attributes:
        pool: The processes.
        model: The model's name.
        folder: A directory for records.
        settings: Arguments of the Trainer.
        precision: The precision of both runs.
    """

    pool: WorkerPool
    model: str
    folder: Path
    settings: dict[str, Any]
    precision: str = "32-true"

    def __post_init__(self) -> None:
        self.job = Job(directory="", capture=str(self.folder / "captured"), steps=STEPS)
        self.alone = Subject("auto")
        self.a = self.run("a", self.alone, 1, captures=True)
        self.twin = self.run("twin", self.alone, 1, precision="64-true")

    def run(self, name: str, subject: Subject, processes: int, **changes: Any) -> Run:
        """Record a run."""
        directory = self.folder / name
        for old in directory.glob("*") if directory.is_dir() else ():
            old.unlink()
        job = replace(self.job, **{"precision": self.precision, "directory": str(directory), **changes})
        self.pool.run(
            record_run,
            job,
            self.model,
            subject,
            self.settings,
            world_size=processes,
            timeout=300,
            end_after=20,
        )
        return read_run(directory, f"{subject.strategy}@{processes}")

    def compare(self, subject: Subject, processes: int) -> tuple[Run, Comparison]:
        """Record a run, and compare it with one process."""
        b = self.run("b", subject, processes)
        return b, Comparer(self.a, b, self.twin).compare()

    def verdict(self, subject: Subject, processes: int) -> Verdict | None:
        """Compare, run again for the culprit, and judge."""
        b, compared = self.compare(subject, processes)

        def again(finding: Finding, wanted: Sequence[Wanted]) -> tuple[Path, Path]:
            explain = (finding.step, finding.kind, finding.origin.name, processes)
            changes: dict[str, Any] = {"whole": wanted, "steps": finding.step + 1}
            right = self.run("a whole", self.alone, 1, precision="64-true", explain=explain, **changes)
            return right.directory, self.run("b whole", subject, processes, **changes).directory

        return find_verdict(self.a, b, compared, again)


def right_parameter(planted: Planted, verdict: Verdict, model: type[Model]) -> bool:
    """Return True if a verdict names the tensor of a fault, or one of those if it has many."""
    parameters = [name for name, _ in model().named_parameters()]
    layer = model.target.rpartition(".")[0]
    expected = {
        "target": {model.target},
        "vector": {model.elementwise},
        "layer": {layer, model.target, model.elementwise},
        "first": {parameters[0]},
        "last": set(parameters[-2:]),
        "before": set(parameters[: parameters.index(model.target)]),
        "any": set(parameters),
        "loss": {"loss"},
        "batch": {"batch"},
        "input": {model.first, "batch"},
    }
    return verdict.tensor in expected[planted.where]
