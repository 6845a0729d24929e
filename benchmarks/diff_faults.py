"""Planted faults, found and named by ``nnx diff``, and healthy strategies, which must raise no alarm.

    python benchmarks/diff_faults.py                # all faults x MLP, GPT, CNN on 2 processes, and no alarms
    python benchmarks/diff_faults.py --processes 4 --models GPT --only "stale" --no-healthy
    python benchmarks/diff_faults.py --held-back    # faults that the verdict was not developed with

Each fault is planted in data parallelism (`tests/faults/diff.py`) and compared with one process. A fault
is found if the runs differ, has the right kind if the verdict names one of its kinds, and the right parameter
if it names the changed tensor or its layer. Exit code 1 if fewer than 100 % are found, fewer than 90 % have
the right kind, fewer than 95 % the right parameter, or a healthy strategy differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

for folder in ("tests", "tests/helpers", "examples/tiny_backend/src"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

from faults.diff import FAULTS, HELD_BACK, Planted  # noqa: E402
from faults.diff_models import MODELS, STEPS, Model, record_run  # noqa: E402
from nnx_conformance.diff.comparison import Comparer, Comparison  # noqa: E402
from nnx_conformance.diff.job import Job  # noqa: E402
from nnx_conformance.diff.record import Run, read_run  # noqa: E402
from nnx_conformance.diff.verdict import Verdict, judge, wanted_whole  # noqa: E402
from nnx_conformance.pool import PRELOAD, WorkerPool  # noqa: E402
from nnx_conformance.subject import Subject  # noqa: E402

HEALTHY = [
    *("ddp", "tiny", "fsdp_auto", "nnscaler_dp", "nnscaler_zero", "nnscaler_tp", "nnscaler_pp", "colossalai"),
    *("nnx_deepspeed_1", "nnx_deepspeed_2", "nnx_deepspeed_3", "fairscale_sharded", "fairscale_oss"),
    *("fairscale_fsdp", "nnscaler", "nnscaler_deduped", "fsdp_offload", "nnscaler_hybrid"),
]
OPTIONS: dict[str, dict[str, Any]] = {}


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
        finding, whole = compared.finding, None
        if finding is not None and (wanted := wanted_whole(finding)):
            explain = (finding.step, finding.kind, finding.origin.name, processes)
            again = {"whole": wanted, "steps": finding.step + 1}
            right = self.run("a whole", self.alone, 1, precision="64-true", explain=explain, **again)
            wrong = self.run("b whole", subject, processes, **again)
            whole = right.directory, wrong.directory
        return judge(self.a, b, compared, whole=whole)


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


def try_faults(bench: Bench, names: Sequence[str], processes: int) -> Iterator[tuple[str, bool, bool, bool]]:
    """Yield for each fault whether it was found, with the right kind and the right parameter."""
    model = MODELS[bench.model]
    for name in names:
        options = {"fault": name, "target": model.target, "vector": model.elementwise}
        verdict = bench.verdict(Subject("faults.diff:Faulty", options=options), processes)
        found = verdict is not None
        kind = verdict is not None and verdict.kind in FAULTS[name].kinds
        right = verdict is not None and right_parameter(FAULTS[name], verdict, model)
        mark = (
            "ok"
            if kind and right
            else "KIND"
            if right
            else "PARAMETER"
            if kind
            else "BOTH"
            if found
            else "NONE"
        )
        said = "nothing" if verdict is None else f"{verdict.kind}: {verdict}"
        print(f"{mark:<10}{bench.model} x {processes}  {name}  ->  {said}", flush=True)
        yield name, found, kind, right


def try_healthy(pool: WorkerPool, model: str, precision: str, processes: int) -> Iterator[bool]:
    """Yield for each strategy whether it differs from one process without a fault."""
    with tempfile.TemporaryDirectory(prefix="nnx-diff-") as folder:
        bench = Bench(pool, model, Path(folder), {}, precision)
        for name in HEALTHY:
            started = time.monotonic()
            try:
                b, compared = bench.compare(Subject(name, options=OPTIONS.get(name, {})), processes)
            except Exception as error:
                print(f"refused   {model} {precision} {name}: {str(error).splitlines()[0][:150]}", flush=True)
                continue
            worst = {
                k: round(max((v for s in t.values() for v in s.values()), default=0), 2)
                for k, t in compared.table.items()
            }
            alarm = compared.finding is not None
            mark = "ALARM" if alarm else "refused" if b.error else "equal"
            print(
                f"{mark:<10}{model} {precision} {name}@{processes}  {compared.steps} steps, largest part of "
                f"the tolerance {worst} {b.error[:150]} {time.monotonic() - started:.0f} s",
                flush=True,
            )
            if alarm and compared.finding is not None:
                print(f"          {compared.finding.kind} {compared.finding.origin}", flush=True)
            yield alarm


def main() -> int:
    """Try faults and healthy strategies; print shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--only", default="", help="a part of the names of faults")
    parser.add_argument("--held-back", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-healthy", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="try each so many-th fault only")
    given = parser.parse_args()
    names = [n for n in FAULTS if n and given.only in n and (n in HELD_BACK) == given.held_back][
        :: given.every
    ]
    results, alarms = [], []
    with WorkerPool(max(given.processes, 2), preload=[*PRELOAD, "faults.diff_models"]) as pool:
        for model in given.models:
            if not given.no_faults:
                with tempfile.TemporaryDirectory(prefix="nnx-diff-") as folder:
                    bench = Bench(pool, model, Path(folder), {})
                    results += list(try_faults(bench, names, given.processes))
            for precision in () if given.no_healthy else ("32-true", "bf16-mixed"):
                alarms += list(try_healthy(pool, model, precision, given.processes))
    return report(results, alarms)


def report(results: Sequence[tuple[str, bool, bool, bool]], alarms: Sequence[bool]) -> int:
    """Print the shares; return 1 if one is too small."""
    shares = [sum(r[i] for r in results) / len(results) if results else 1.0 for i in (1, 2, 3)]
    print(
        f"{len(results)} faults: {shares[0]:.1%} found, {shares[1]:.1%} with the right kind, "
        f"{shares[2]:.1%} with the right parameter; {sum(alarms)} alarms in {len(alarms)} healthy runs"
    )
    return int(shares[0] < 1 or shares[1] < 0.9 or shares[2] < 0.95 or any(alarms))


if __name__ == "__main__":
    sys.exit(main())
