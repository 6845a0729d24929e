"""Step time with the divergence check (`check_every=100`) against the same training without it.

    python benchmarks/divergence.py
    python benchmarks/divergence.py --strategy nnscaler_dp

Both sides train the same GPT with the same strategy in the same processes of one run, in turns, each side
first in every other round. One step in a hundred has a comparison, so the output has the mean over all steps,
not the median, and the time of the comparisons alone, which varies less on a busy machine. Exit code 1 if
they took more than the bar.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from processes import start_again

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


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
    for name in ("lightning.pytorch", "lightning.fabric", "nnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    steps: dict[int, list[float]] = {0: [], arguments.every: []}
    comparing: list[float] = []
    for turn in range(arguments.rounds):
        for every in sorted(steps, reverse=bool(turn % 2)):
            taken, compared = train(every, arguments)
            steps[every] += taken
            comparing += compared
    if os.environ["RANK"] != "0":
        return 0
    without, with_it = (statistics.fmean(steps[every]) * 1e3 for every in (0, arguments.every))
    once = statistics.median(comparing) * 1e3
    share = once / arguments.every / without
    rounds = f"{arguments.rounds} x {arguments.steps} steps"
    print(f"{arguments.strategy}, {arguments.processes} processes, {rounds}")
    print(f"processor time of rank 0, mean ms a step: {without:.2f} without, {with_it:.2f} with")
    print(f"ratio {with_it / without:.4f}")
    print(f"one comparison: {once:.2f} ms; every {arguments.every} steps that is {share:.4%} of a step")
    return 0 if share <= arguments.bar else 1


def train(every: int, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """One short training: processor seconds of each step after warming up, and of each comparison."""
    import torch
    from gpt.model import GPTConfig
    from gpt.module import LitGPT
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    import nnx
    from nnx_core.agree.divergence import DivergenceCheck

    class Stopwatch(Callback):
        def __init__(self) -> None:
            self.starts: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.starts.append(time.process_time())

    seed_everything(0, verbose=False)
    count = arguments.warmup + arguments.steps
    tokens = torch.randint(256, (arguments.batch * 8, arguments.context + 1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=arguments.batch)
    size = {"layers": arguments.layers, "width": arguments.width, "context": arguments.context}
    stopwatch, compared, compare = Stopwatch(), [], DivergenceCheck.compare

    def timed(*args: Any) -> None:
        began = time.process_time()
        compare(*args)
        compared.append(time.process_time() - began)

    DivergenceCheck.compare = timed  # type: ignore[method-assign]
    try:
        Trainer(
            accelerator=arguments.accelerator,
            devices=arguments.processes,
            strategy=nnx.strategy(arguments.strategy, check_every=every),
            max_steps=count,
            max_epochs=-1,
            callbacks=stopwatch,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(LitGPT(GPTConfig(**size), steps=count), data)
    finally:
        DivergenceCheck.compare = compare  # type: ignore[method-assign]
    laps = [after - before for before, after in zip(stopwatch.starts, stopwatch.starts[1:], strict=False)]
    return laps[arguments.warmup :], compared[2:]  # the first two find the replicated tensors


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="fsdp_auto")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--steps", type=int, default=200, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--every", type=int, default=100, help="`check_every` of the checked side")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--bar", type=float, default=0.01, help="the largest share of a step that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
