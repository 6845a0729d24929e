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
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from plan_models import MODELS
from torch.utils.data import IterableDataset

STRATEGIES = ("ddp", "fsdp_auto", "nnscaler_zero", "colossalai", "nnx_deepspeed_2")
PHASES = ("forward", "backward", "step")
_MAKES = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::zeros",
    "aten::zeros_like",
    "[memory]",
}


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 32}", "MALLOC_TRIM_THRESHOLD_": "-1"}
_NEVER = 1 << 62
Stack = tuple[tuple[str, int], ...]
"""The names and the ends of the operators around a block."""


class Block(NamedTuple):
    """Memory of the allocator, from its start to its end, in nanoseconds."""

    start: int
    end: int
    nbytes: int
    is_workspace: bool
    stack: tuple[str, ...]


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
    import lightning.pytorch as pl
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    class Marks(pl.Callback):
        step = 0

        def mark(self, name: str) -> None:
            with record_function(f"mark:{self.step}:{name}"):
                pass

        def on_train_batch_start(self, *_: Any) -> None:
            self.mark("forward")

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            run = trainer.strategy.backward

            def backward(*args: Any, **kwargs: Any) -> Any:  # a hook would make engines publish gradients
                self.mark("backward")
                result = run(*args, **kwargs)
                self.mark("step")
                return result

            trainer.strategy.backward = backward

        def on_train_batch_end(self, *_: Any) -> None:
            self.mark("end")
            self.step += 1

    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
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
            callbacks=[Marks()],
            use_distributed_sampler=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(_Batches(batch), batch_size=None))
        # Threads of gloo free blocks unseen. To fill the heap shows them: a new block takes their place.
        filling = [torch.empty(size, dtype=torch.uint8) for size in (1 << 16, 1 << 12) for _ in range(4000)]
        del filling
    if trainer.global_rank:
        return {}
    return _peaks(*_blocks(profiler.profiler.kineto_results.experimental_event_tree()), dump)


class _Batches(IterableDataset[Any]):
    """One batch, several times."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, 5)


def _blocks(roots: list[Any]) -> tuple[list[Block], dict[str, int]]:
    """Return all blocks and the times of the marks."""
    found: list[tuple[int, int, int, Stack]] = []
    marks: dict[str, int] = {}
    waiting: list[tuple[Any, Stack]] = [(root, ()) for root in roots]
    while waiting:
        event, stack = waiting.pop()
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, stack))
            continue
        if event.name.startswith("mark:"):
            marks[event.name[5:]] = event.start_time_ns
        inner = (*stack, (event.name, event.end_time_ns))
        waiting += [(child, inner) for child in event.children]
    blocks: list[Block] = []
    live: dict[int, tuple[int, int, Stack]] = {}
    addresses: list[int] = []  # of the live blocks, sorted

    def end(address: int, time: int, *, seen: bool) -> None:
        start, nbytes, stack = live.pop(address)
        addresses.remove(address)
        last = time if seen else min(time, _end_unseen(start, stack, marks))
        blocks.append(_block(start, last, nbytes, stack))

    for time, address, nbytes, stack in sorted(found, key=lambda one: one[0]):
        if nbytes < 0:
            if address in live:
                end(address, time, seen=True)
            continue
        place = bisect_left(addresses, address)
        covered = addresses[place : bisect_left(addresses, address + nbytes)]
        before = addresses[place - 1 : place]
        for other in covered + [one for one in before if one + live[one][1] > address]:
            end(other, time, seen=False)
        insort(addresses, address)
        live[address] = time, nbytes, stack
    return blocks + [_block(start, _NEVER, nbytes, stack) for start, nbytes, stack in live.values()], marks


def _block(start: int, end: int, nbytes: int, stack: Stack) -> Block:
    operators = [until for name, until in stack if name.startswith("aten::") and name not in _MAKES]
    is_workspace = bool(operators) and end <= operators[-1]
    return Block(start, end, nbytes, is_workspace, tuple(name for name, _ in stack))


def _end_unseen(start: int, stack: Stack, marks: dict[str, int]) -> int:
    """Return when a block ended at the latest, if a thread of gloo freed it: with its collective or phase."""
    sent = [until for name, until in stack if name.startswith(("c10d::", "gloo:"))]
    return sent[0] if sent else min((time for time in marks.values() if time > start), default=start)


def _peaks(blocks: list[Block], marks: dict[str, int], dump: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for phase, until in zip(PHASES, ("backward", "step", "end"), strict=True):
        start, stop = marks[f"2:{phase}"], marks[f"2:{until}"]
        of_tensors, of_all, begin = _peak(blocks, start, stop, dump if dump in (phase, "all") else "")
        result[phase] = {"tensors": of_tensors, "allocator": of_all, "begin": begin}
    return result


def _peak(blocks: list[Block], start: int, until: int, dump: str) -> tuple[int, int, int]:
    for block in blocks if dump else ():
        if block.start < start <= block.end and block.nbytes >= 20000:
            print(f"= {block.nbytes}  {' > '.join(block.stack[-4:])}")
    changes = [(b.start, b.nbytes, b) for b in blocks] + [(b.end, -b.nbytes, b) for b in blocks]
    tensors = everything = most = most_of_all = begin = 0
    for time, nbytes, block in sorted(changes, key=lambda change: change[0]):
        if time >= until:
            break
        if time >= start and not begin:
            begin = most = most_of_all = tensors
        everything += nbytes
        tensors += 0 if block.is_workspace else nbytes
        if time >= start:
            most, most_of_all = max(most, tensors), max(most_of_all, everything)
            if dump and abs(nbytes) >= 20000 and not block.is_workspace:
                print(f"{nbytes:+d} -> {tensors}  {' > '.join(block.stack[-4:])}")
    return most, most_of_all, begin


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
    one_heap = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "-1",
    }
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | one_heap
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
