"""Compare the bytes that `nnx plan` predicts with those of real runs.

A cell is a model, a strategy and a number of gloo processes. The truth is torch's CPU allocator: the
profiler reports each block that is allocated and freed, on rank zero, in the third step of a real Trainer. A
block that one operator allocates and frees is its workspace: it is no tensor, so it has a column of its own.
The models of a strategy and a number of processes share one launch.

    python benchmarks/plan_truth.py --worlds 1 2 4 --keep /tmp/cells
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from plan_models import MODELS
from torch.utils.data import IterableDataset

from nnx_core.lightning.plan_check import PlanCheck
from nnx_core.planning.measured import Block, CpuMeter, Measured

STRATEGIES = ("ddp", "fsdp_auto", "nnscaler_zero", "colossalai", "nnx_deepspeed_2")
PHASES = ("forward", "backward", "step")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 32}", "MALLOC_TRIM_THRESHOLD_": "-1"}


class Meter(CpuMeter):
    """The meter of `check_plan`, which sees what threads of gloo free.

    Args:
        dump: The phase whose blocks are printed, or "all".
    """

    def __init__(self, dump: str) -> None:
        super().__init__()
        self._dump = dump

    def close(self) -> None:
        """Fill the heap, so that new blocks take the place of those that ended unseen."""
        filling = [torch.empty(size, dtype=torch.uint8) for size in (1 << 16, 1 << 12) for _ in range(4000)]
        del filling
        super().close()

    def blocks(self) -> tuple[list[Block], dict[str, int]]:
        """Print the blocks of the phase to dump."""
        blocks, marks = super().blocks()
        times = sorted((time, phase) for phase, time in marks.items())
        for (start, phase), (until, _) in pairwise(times):
            if self._dump in (phase, "all"):
                dump_blocks(blocks, start, until)
        return blocks, marks


def dump_blocks(blocks: list[Block], start: int, until: int) -> None:
    """Print the large blocks that live at the start of a phase, begin in it, or end in it."""
    for block in blocks:
        if block.is_workspace or block.nbytes < 20000:
            continue
        place = " > ".join(block.stack[-4:])
        if block.start < start <= block.end:
            print(f"= {block.nbytes}  {place}")
        elif start <= block.start < until:
            print(f"+ {block.nbytes}  {place}")
        if start <= block.end < until:
            print(f"- {block.nbytes}  {place}")


def measure(names: Sequence[str], strategy: str, world: int, precision: str, dump: str) -> None:
    """Run the cells of a strategy, and print the peaks of the third step of each on rank zero."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in names:
        truth = _measure(name, strategy, world, precision, dump)
        if truth:
            print(f"TRUTH {name} {json.dumps(truth)}", flush=True)
        gc.collect()


def _measure(name: str, strategy: str, world: int, precision: str, dump: str) -> dict[str, Any]:
    torch.manual_seed(0)
    truth: dict[str, Any] = {}

    def keep(measured: Mapping[str, Measured]) -> None:
        truth.update(
            {phase: {"tensors": one.tensors, "allocator": one.allocated} for phase, one in measured.items()}
        )

    check = type("Check", (PlanCheck, pl.Callback), {})(Meter(dump), keep)
    model = MODELS[name]()
    batch = model.batch()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=4,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[check],
        use_distributed_sampler=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(_Batches(batch), batch_size=None))
    return {} if trainer.global_rank else truth


class _Batches(IterableDataset[Any]):
    """One batch, several times."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, 5)


def predict(model_name: str, strategy: str, world: int, precision: str) -> dict[str, Any]:
    """Return the predicted peak of each phase."""
    from nnx_core.planning.estimate import World
    from nnx_core.planning.model import estimator, trace_module

    model = MODELS[model_name]
    trace = trace_module(model, lambda module: module.batch(), precision=precision, accelerator="cpu")
    if trace.source != "traced":
        raise RuntimeError(f"{model_name} was not traced: {trace.notes}")
    estimate = estimator(strategy)(trace, World(size=world, accelerator="cpu")).run()
    return {phase.name: phase for phase in estimate.phases}


def run_cells(
    models: Sequence[str], strategy: str, world: int, precision: str, dump: str
) -> dict[str, dict[str, Any]]:
    """Run cells of a strategy one after the other in processes of their own, and return the truth of each."""
    command = [sys.executable, __file__, "--measure", ",".join(models), strategy, str(world), precision, dump]
    variables = os.environ | _ONE_THREAD | _ONE_HEAP
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("TRUTH ")]
    if dump:
        print("\n".join(line for line in done.stdout.splitlines() if line[:1] in "+-="))
    found = {name: json.loads(truth) for _, name, truth in lines}
    for name in models:
        if name not in found:
            print(f"{name} under {strategy} on {world} ended with {done.stderr[-2000:]}")
            break
    return found


def main() -> int:
    """Run the cells, and print the table and the share of cells within 1 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--keep", type=Path, help="a directory for measured cells, which are not run again")
    parser.add_argument("--dump", default="", help="print the blocks of a phase of each cell")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        names, strategy, world, precision, dump = arguments.measure
        measure(names.split(","), strategy, int(world), precision, dump)
        return 0
    errors: list[tuple[float, str]] = []
    print(f"{'model':6} {'strategy':16} ranks {'phase':9}{'predicted':>12}{'tensors':>12}  error  workspace")
    for strategy in arguments.strategies:
        for world in arguments.worlds:
            truths = _truths(strategy, world, arguments)
            errors += [_compare(name, strategy, world, arguments, truths[name]) for name in truths]
    good = sum(abs(error) <= 0.01 for error, _ in errors)
    cells = len(arguments.strategies) * len(arguments.worlds) * len(arguments.models)
    print(f"{good} of {cells} cells are within 1 % ({100 * good / cells:.0f} %)")
    worst = sorted(errors, key=lambda one: abs(one[0]))[-5:]
    print("worst:", ", ".join(f"{name} {100 * error:+.2f} %" for error, name in worst))
    return 0


def _truths(strategy: str, world: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the truth of each model, from the directory of kept cells or from a run."""

    def kept(name: str) -> Path | None:
        folder: Path | None = arguments.keep
        return folder and folder / f"{name}.{strategy}.{world}.{arguments.precision}.json"

    files = {name: kept(name) for name in arguments.models}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file and file.exists()}
    missing = [name for name in arguments.models if name not in found or arguments.dump]
    if missing:
        ran = run_cells(missing, strategy, world, arguments.precision, arguments.dump)
        for name, truth in ran.items():
            if file := files[name]:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(truth))
        found |= ran
    return {name: found[name] for name in arguments.models if name in found}


def _compare(
    model: str, strategy: str, world: int, arguments: argparse.Namespace, truth: dict[str, Any]
) -> tuple[float, str]:
    predicted = predict(model, strategy, world, arguments.precision)
    for phase in PHASES:
        mine, real = predicted[phase].peak, truth[phase]["tensors"]
        space = truth[phase]["allocator"] - real
        print(
            f"{model:6} {strategy:16} {world:5} {phase:9}{mine:12}{real:12} "
            f"{100 * (mine / real - 1):+6.2f}{space:11}",
            flush=True,
        )
    most, real = (max(p.peak for p in predicted.values()), max(t["tensors"] for t in truth.values()))
    return most / real - 1, f"{model} {strategy} {world}"


if __name__ == "__main__":
    sys.exit(main())
