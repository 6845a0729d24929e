"""Compare the bytes that `nnx plan` predicts with those of real runs.

A cell is a model, a strategy and a number of gloo processes. The truth is torch's CPU allocator: the
profiler reports each block that is allocated and freed, on rank zero, in the third step of a real Trainer. A
block that one operator allocates and frees is its workspace: it is no tensor, so it has a column of its own.

    python benchmarks/plan_truth.py --models GPT CNN LSTM --worlds 1 2
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Block(NamedTuple):
    """Memory of the allocator, from its start to its end, in nanoseconds."""

    start: int
    end: int
    nbytes: int
    is_workspace: bool
    stack: tuple[str, ...]


def measure(model_name: str, strategy: str, world: int, precision: str, dump: str) -> None:
    """Run a cell, and print the peaks of its third step on rank zero."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning.pytorch as pl
    import torch
    from plan_models import MODELS
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

    class Data(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(5):
                yield batch

    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = MODELS[model_name]()
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
        trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=None))
    if trainer.global_rank == 0:
        blocks, marks = _blocks(profiler.profiler.kineto_results.experimental_event_tree())
        print("TRUTH " + json.dumps(_peaks(blocks, marks, dump)))


def _blocks(roots: list[Any]) -> tuple[list[Block], dict[str, int]]:
    """Return all blocks and the times of the marks."""
    found: list[tuple[int, int, int, tuple[tuple[str, int], ...]]] = []
    marks: dict[str, int] = {}
    waiting: list[tuple[Any, tuple[tuple[str, int], ...]]] = [(root, ()) for root in roots]
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
    blocks, live = [], {}
    for time, pointer, nbytes, stack in sorted(found, key=lambda one: one[0]):
        before = live.pop(pointer, None)
        if before is not None:
            blocks.append(_block(before, time if nbytes < 0 else None, marks))
        if nbytes > 0:
            live[pointer] = time, nbytes, stack
    return blocks + [_block(one, None, marks) for one in live.values()], marks


def _block(
    made: tuple[int, int, tuple[tuple[str, int], ...]], end: int | None, marks: dict[str, int]
) -> Block:
    start, nbytes, stack = made
    names = tuple(name for name, _ in stack)
    if end is None:
        end = _end_elsewhere(start, stack, marks)
    operators = [(name, until) for name, until in stack if name.startswith("aten::") and name not in _MAKES]
    is_workspace = bool(operators) and end <= operators[-1][1]
    return Block(start, end, nbytes, is_workspace, names)


def _end_elsewhere(start: int, stack: tuple[tuple[str, int], ...], marks: dict[str, int]) -> int:
    """Return when a block was freed whose end the profiler has not seen.

    A thread of gloo may drop the last reference to a tensor that was sent. A collective's own blocks end with
    it. Blocks that a later step makes end with their phase; only the first step makes tensors that stay.
    """
    sent = [until for name, until in stack if name.startswith(("c10d::", "gloo:"))]
    if sent:
        return sent[0]
    following = sorted(time for time in marks.values() if time > start)
    is_first = start < marks.get("1:forward", 0)
    stays = is_first and not any(name.startswith("FSDP::") for name, _ in stack)
    return 1 << 62 if stays or start < marks["0:forward"] or not following else following[0]


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
    from plan_models import MODELS

    from nnx_core.planning.estimate import World
    from nnx_core.planning.model import estimator, trace_module

    model = MODELS[model_name]
    trace = trace_module(model, lambda module: module.batch(), precision=precision, accelerator="cpu")
    if trace.source != "traced":
        raise RuntimeError(f"{model_name} was not traced: {trace.notes}")
    estimate = estimator(strategy)(trace, World(size=world, accelerator="cpu")).run()
    return {phase.name: phase for phase in estimate.phases}


def run_cell(model: str, strategy: str, world: int, precision: str, dump: str = "") -> dict[str, Any]:
    """Run a cell in processes of its own, and return the truth."""
    command = [sys.executable, __file__, "--measure", model, strategy, str(world), precision, dump]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRUTH ")]
    if dump:
        print("\n".join(line for line in done.stdout.splitlines() if line[:1] in "+-="))
    if not lines:
        raise RuntimeError(f"{model} under {strategy} on {world} ended with {done.stderr[-2000:]}")
    return json.loads(lines[0][6:])


def main() -> int:
    """Run the cells, and print the table and the share of cells within 1 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["GPT", "CNN", "LSTM"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--runs", type=int, default=1, help="take the least of several runs of a cell")
    parser.add_argument("--keep", type=Path, help="a directory for measured cells, which are not run again")
    parser.add_argument("--dump", default="", help="print the blocks of a phase of each cell")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        model, strategy, world, precision, dump = arguments.measure
        measure(model, strategy, int(world), precision, dump)
        return 0
    errors: list[tuple[float, str]] = []
    print(f"{'model':6} {'strategy':16} ranks {'phase':9}{'predicted':>12}{'tensors':>12}  error  workspace")
    for strategy in arguments.strategies:
        for world in arguments.worlds:
            for model in arguments.models:
                errors.append(_compare(model, strategy, world, arguments))
    good = sum(abs(error) <= 0.01 for error, _ in errors)
    print(f"{good} of {len(errors)} cells are within 1 % ({100 * good / len(errors):.0f} %)")
    print(
        "worst:", ", ".join(f"{name} {100 * error:+.2f} %" for error, name in sorted(errors, key=_size)[-5:])
    )
    return 0


def _size(one: tuple[float, str]) -> float:
    return abs(one[0])


def _compare(model: str, strategy: str, world: int, arguments: argparse.Namespace) -> tuple[float, str]:
    predicted = predict(model, strategy, world, arguments.precision)
    kept = arguments.keep and arguments.keep / f"{model}.{strategy}.{world}.{arguments.precision}.json"
    if kept and kept.exists() and not arguments.dump:
        truth = json.loads(kept.read_text())
    else:
        runs = [
            run_cell(model, strategy, world, arguments.precision, arguments.dump)
            for _ in range(arguments.runs)
        ]
        # A thread of gloo may free a tensor unseen in one run and not in another: the least is the truth.
        truth = min(runs, key=lambda run: run["forward"]["begin"])
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(truth))
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
