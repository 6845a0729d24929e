"""Step time of `fsdp_auto` against Lightning's ModelParallelStrategy with `fully_shard` written by hand.

    python benchmarks/step_time.py

Both sides train the same GPT with the same FSDP units (which is checked), in the same processes of one
run. They take turns over several rounds, each side first in every other round, so that other work on the
machine affects both. The output is the medians over all steps and their ratio; exit code 1 if it is
above the bar, 2 if the two cannot be compared. The processor time of rank 0 is printed as well, which is
more stable than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from processes import start_again

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
LABELS = {"nnx": "nnx: fsdp_auto", "lightning": "Lightning: ModelParallelStrategy + fully_shard"}


class Lap(NamedTuple):
    """Seconds on the clock, and of processor time of this process with all its threads."""

    wall: float
    cpu: float

    def since(self, earlier: Lap) -> Lap:
        """Return the time since an earlier lap."""
        return Lap(self.wall - earlier.wall, self.cpu - earlier.cpu)


def main() -> int:
    """Start the processes, or be one of them."""
    arguments = parse_arguments()
    if "LOCAL_RANK" in os.environ:
        return measure(arguments)
    return start_again(arguments.processes)


def measure(arguments: argparse.Namespace) -> int:
    """Let both sides take turns, in this process and the others at once."""
    import lightning.pytorch  # noqa: F401 (it sets its own log level, so it comes first)

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "nnx", "nnx.fsdp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    laps: dict[str, list[list[Lap]]] = {side: [] for side in LABELS}
    units: dict[str, list[list[str]]] = {}
    for turn in range(arguments.rounds):
        for side in list(LABELS)[:: 1 if turn % 2 == 0 else -1]:
            taken, units[side] = train(side, arguments)
            laps[side].append(taken)
    if os.environ["RANK"] != "0":
        return 0
    if units["nnx"] != units["lightning"]:
        print("The two sides do not shard the same units, so their times say nothing.", file=sys.stderr)
        for side, found in units.items():
            print(f"{LABELS[side]}: {found}", file=sys.stderr)
        return 2
    return report(laps, arguments)


def train(side: str, arguments: argparse.Namespace) -> tuple[list[Lap], list[list[str]]]:
    """One short training by one side: the time of each step after warming up, and the units."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    class Stopwatch(Callback):
        def __init__(self) -> None:
            self.starts: list[Lap] = []
            self.units: list[list[str]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if arguments.accelerator == "cuda":
                torch.cuda.synchronize()
            self.starts.append(Lap(time.perf_counter(), time.process_time()))
            self.units = self.units or units_of(module)

    seed_everything(0, verbose=False)
    steps = arguments.warmup + arguments.steps + 1
    tokens = torch.randint(256, (steps * arguments.batch, arguments.context + 1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=arguments.batch)
    stopwatch = Stopwatch()
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.processes,
        strategy=strategy(side, arguments),
        max_epochs=1,
        callbacks=stopwatch,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model(side, arguments), data)
    laps = [
        after.since(before) for before, after in zip(stopwatch.starts, stopwatch.starts[1:], strict=False)
    ]
    return laps[arguments.warmup :], stopwatch.units


def strategy(side: str, arguments: argparse.Namespace) -> Any:
    """Return Trainer's `strategy=` argument."""
    if side == "nnx":
        return "fsdp_auto"
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=arguments.processes, tensor_parallel_size=1)


def model(side: str, arguments: argparse.Namespace) -> Any:
    """The same GPT; Lightning's side needs the sharding written out."""
    from gpt.model import GPTConfig
    from gpt.module import LitGPT
    from torch.distributed.fsdp import fully_shard

    class ShardedByHand(LitGPT):
        def configure_model(self) -> None:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    build: Callable[..., Any] = LitGPT if side == "nnx" else ShardedByHand
    size = {"layers": arguments.layers, "width": arguments.width, "context": arguments.context}
    return build(GPTConfig(**size), steps=arguments.steps)


def units_of(module: Any) -> list[list[str]]:
    """Return the parameters of each FSDP unit, by their nearest FSDP module."""
    from torch.distributed.fsdp import FSDPModule

    sharded = {name for name, child in module.named_modules() if isinstance(child, FSDPModule)}
    units: dict[str | None, set[str]] = {}
    for name, _ in module.named_parameters():
        above = [name[:end] for end in range(len(name)) if name[end] == "."]
        owner = next((path for path in [*reversed(above), ""] if path in sharded), None)
        units.setdefault(owner, set()).add(name)
    unsharded = sorted(units.pop(None, ()))
    return [unsharded, *sorted(sorted(names) for names in units.values())]


def report(laps: dict[str, list[list[Lap]]], arguments: argparse.Namespace) -> int:
    """Print the medians, the ratio of each round and of all, and judge."""
    wall = {side: [[lap.wall for lap in turn] for turn in turns] for side, turns in laps.items()}
    cpu = {side: [[lap.cpu for lap in turn] for turn in turns] for side, turns in laps.items()}
    print(
        f"GPT of {arguments.layers} layers, width {arguments.width}, "
        f"{arguments.batch} x {arguments.context} tokens per rank; "
        f"{arguments.processes} processes on {arguments.accelerator}; "
        f"{arguments.rounds} rounds of {arguments.steps} steps a side"
    )
    ratio = compare("clock, median ms per step", wall)
    compare("processor time of rank 0, median ms per step", cpu)
    print(f"clock ratio {ratio:.3f}, bar {arguments.bar}")
    return 0 if ratio <= arguments.bar else 1


def compare(what: str, times: dict[str, list[list[float]]]) -> float:
    """Print both sides and their ratio, over all and round by round; return the former."""
    medians = {side: statistics.median(chain(*turns)) for side, turns in times.items()}
    by_round = [
        statistics.median(ours) / statistics.median(theirs)
        for ours, theirs in zip(times["nnx"], times["lightning"], strict=True)
    ]
    print(f"{what}:")
    for side, label in LABELS.items():
        print(f"  {label:46} {medians[side] * 1e3:8.2f}")
    ratio = medians["nnx"] / medians["lightning"]
    print(f"  {'ratio':46} {ratio:8.3f}   rounds: {' '.join(f'{one:.3f}' for one in by_round)}")
    return ratio


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--steps", type=int, default=30, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--bar", type=float, default=1.05, help="the largest ratio that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
