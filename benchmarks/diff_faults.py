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
from pathlib import Path

for folder in ("tests", "tests/helpers", "examples/tiny_backend/src"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

from faults.diff import FAULTS, HELD_BACK  # noqa: E402
from faults.diff_bench import Bench, right_parameter  # noqa: E402
from faults.diff_models import MODELS  # noqa: E402
from nnx_conformance.pool import PRELOAD, WorkerPool  # noqa: E402
from nnx_conformance.subject import Subject  # noqa: E402

HEALTHY = [
    *("ddp", "tiny", "fsdp_auto", "nnscaler_dp", "nnscaler_zero", "nnscaler_tp", "nnscaler_pp", "colossalai"),
    *("nnx_deepspeed_1", "nnx_deepspeed_2", "nnx_deepspeed_3", "fairscale_sharded", "fairscale_oss"),
    *("fairscale_fsdp", "nnscaler", "nnscaler_deduped", "fsdp_offload", "nnscaler_hybrid", "fsdp_hybrid"),
]


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
                b, compared = bench.compare(Subject(name), processes)
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
            if not given.no_faults and model != "AdamGPT":
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
