"""The main use case: train a small GPT on two processes, resume it on one and on three, compare.

    python examples/train_gpt.py

Trains on the bytes of the standard library's own sources, saves in the middle, resumes that checkpoint at
other world sizes with the same global batch, prints a table of the losses and draws them. Exit code 0
if every resumed loss equals the uninterrupted one within the tolerance, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpt.report import Losses, comparison_table, draw, largest_difference, read_losses
from rich.console import Console

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
RESUMED_ON = (1, 3)
"""World sizes that resume the checkpoint of two processes."""


def main() -> int:
    """Run the three trainings, print the comparison and return the exit code."""
    arguments = parse_arguments()
    console = Console()
    middle = arguments.steps // 2
    reference = train(console, arguments, name="uninterrupted", devices=2)
    checkpoint = arguments.out / "uninterrupted" / "checkpoints" / f"step-{middle}.ckpt"
    resumed = {
        f"resumed on {devices}": train(
            console, arguments, name=f"resumed-on-{devices}", devices=devices, resume=checkpoint
        )
        for devices in RESUMED_ON
    }
    console.print(comparison_table(reference, resumed))
    picture = arguments.out / "losses.png"
    draw(picture, reference, resumed, reference_name="uninterrupted on 2 processes")
    console.print(f"Loss curves: {picture}")
    return judge(console, reference, resumed, tolerance=arguments.tolerance)


def train(
    console: Console, arguments: argparse.Namespace, *, name: str, devices: int, resume: Path | None = None
) -> Losses:
    """One run of `gpt.run` in a process of its own, from which Lightning starts the others."""
    out = arguments.out / name
    shutil.rmtree(out, ignore_errors=True)  # or files of an earlier run might pass for this one's
    command = [sys.executable, "-m", "gpt.run", f"--out={out}", f"--devices={devices}"]
    command += [f"--strategy={arguments.strategy}", f"--steps={arguments.steps}"]
    if resume is not None:
        command.append(f"--resume={resume}")
    console.rule(f"{name}: {arguments.strategy} on {devices} process{'es' if devices > 1 else ''}")
    # One thread per process: the processes share few cores, and sums are then always added in one order.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    started = time.perf_counter()
    finished = subprocess.run(command, env=environment, check=False)
    if finished.returncode:
        console.print(
            f"[red]{name} failed with exit code {finished.returncode}; its error stands above.[/red]"
        )
        sys.exit(1)
    console.print(f"{name}: {time.perf_counter() - started:.1f} s")
    return read_losses(out / "losses" / "metrics.csv")


def judge(console: Console, reference: Losses, resumed: dict[str, Losses], *, tolerance: float) -> int:
    """Say whether the resumed losses equal the uninterrupted ones, as an exit code."""
    worst = largest_difference(reference, *resumed.values())
    if not worst <= tolerance:  # also when it is not a number
        console.print(f"[red]The losses differ by up to {worst:.1e}, more than {tolerance:.0e}.[/red]")
        return 1
    console.print(f"[green]The resumed losses equal the uninterrupted ones to {worst:.1e}.[/green]")
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=at_least_two, default=120, help="optimizer steps (default: 120)")
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt"), help="directory for all output")
    parser.add_argument("--strategy", default="fsdp_auto", help="any name that `nnx list` shows")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest loss difference that is equal")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    return arguments


def at_least_two(text: str) -> int:
    """A number of steps that has a middle."""
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps} steps have no middle to save in; give at least 2")
    return steps


if __name__ == "__main__":
    sys.exit(main())
