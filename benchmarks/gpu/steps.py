"""What the runs on GPUs share: steps with limits in processes of their own, lines of JSON, a verdict.

A program names its steps with `step`, and ends in `main`. What only a card has is left out of a dry run, and
said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
Figures = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What the steps run on.

    Attributes:
        accelerator: Lightning's name of it, ``"cuda"`` or ``"cpu"``.
        layers: Blocks of the GPT that is trained.
        width: Size of its token vectors.
        batch: Sequences in a step.
        context: Tokens in a sequence.
    """

    accelerator: str
    layers: int
    width: int
    batch: int
    context: int

    @property
    def is_card(self) -> bool:
        """Whether this is no dry run."""
        return self.accelerator == "cuda"

    @property
    def name(self) -> str:
        """The card's name."""
        return torch.cuda.get_device_name() if self.is_card else "CPU, a dry run"

    def synchronize(self) -> None:
        """Wait until the card has done all its work."""
        if self.is_card:
            torch.cuda.synchronize()


class FailedError(Exception):
    """A step has found something that is not as promised."""


@dataclass(frozen=True)
class Step:
    """One step of the run.

    Attributes:
        run: Does it, and returns its figures; in every process of the step.
        limit: Seconds after which it is stopped.
        ranks: Processes, each with a card; 0 for one without a launcher.
    """

    run: Callable[[Machine], Figures]
    limit: float
    ranks: int


STEPS: dict[str, Step] = {}


def step(
    *, limit: float = 120, ranks: int = 0
) -> Callable[[Callable[[Machine], Figures]], Callable[[Machine], Figures]]:
    """Let a function be one of the steps, under its own name."""

    def add(run: Callable[[Machine], Figures]) -> Callable[[Machine], Figures]:
        STEPS[run.__name__] = Step(run, limit, ranks)
        return run

    return add


def expect(condition: bool, message: str) -> None:
    """Fail the step with a message."""
    if not condition:
        raise FailedError(message)


# --- training -------------------------------------------------------------------------------------


def train(
    machine: Machine, strategy: Any, *, steps: int, resume: str | None = None, **settings: Any
) -> tuple[list[float], list[float], Any]:
    """Train the GPT, every process on the same batches: losses and seconds of the steps, and the Trainer."""
    from gpt.model import GPTConfig
    from gpt.module import LitGPT
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    losses: list[float] = []
    ends: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))
            machine.synchronize()
            ends.append(time.perf_counter())

    torch.manual_seed(0)
    config = GPTConfig(layers=machine.layers, width=machine.width, context=machine.context, heads=4)
    tokens = torch.randint(256, (16 * machine.batch, machine.context + 1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=machine.batch)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "max_steps": steps,
        **quiet,
        **settings,
    }
    callbacks = [Watch(), *chosen.pop("callbacks", ())]
    devices = chosen.pop("devices", int(os.environ.get("WORLD_SIZE", "1")))
    trainer = Trainer(
        accelerator=machine.accelerator, devices=devices, strategy=strategy, callbacks=callbacks, **chosen
    )
    trainer.fit(LitGPT(config, steps=16), data, ckpt_path=resume)
    return losses, [after - before for before, after in pairwise(ends)], trainer


def furthest(found: list[float], wanted: list[float]) -> float:
    """The largest distance between two courses of a loss."""
    expect(len(found) == len(wanted), f"{len(found)} steps were trained, expected {len(wanted)}.")
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


# --- the run --------------------------------------------------------------------------------------


def main(card: Machine, small: Machine, *, cards: int) -> int:
    """Run the steps, each in processes of its own; or be one of them.

    Args:
        card: What they train on cards.
        small: What they train in a dry run.
        cards: The number of cards that are needed at least.

    Returns:
        The exit code.
    """
    arguments = parse_arguments()
    machine = small if arguments.dry_run else card
    if arguments.step:
        return be_step(arguments.step, machine)
    if machine.is_card and torch.cuda.device_count() < cards:
        print(f"This needs {cards} GPUs; --dry-run tries the same code on the CPU.", file=sys.stderr)
        return 2
    wrong = []
    print(json.dumps({"machine": machine.name, "torch": torch.__version__}), flush=True)
    for name in arguments.only or STEPS:
        found = run_step(name, machine)
        print(json.dumps(found), flush=True)
        if not found["ok"]:
            wrong.append(name)
    verdict = f"failed: {', '.join(wrong)}" if wrong else "all steps are as promised"
    print(f"{machine.name}: {verdict}")
    return int(bool(wrong))


def run_step(name: str, machine: Machine) -> Figures:
    """Run one step in processes of its own; its figures, or why it failed."""
    begun = time.perf_counter()
    command = [sys.executable]
    if ranks := STEPS[name].ranks:
        ranks = min(ranks, torch.cuda.device_count() if machine.is_card else 2)
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [sys.argv[0], "--step", name, *([] if machine.is_card else ["--dry-run"])]
    code, out, errors = run_limited(command, limit=STEPS[name].limit)
    lines = [line for line in out.splitlines() if line.startswith("FIGURES ")]
    found = json.loads(lines[-1][len("FIGURES ") :]) if lines else {"error": errors[-2000:]}
    ok = code == 0 and bool(lines)
    if code is None:
        found, ok = {"error": f"it was stopped after {STEPS[name].limit:.0f} s"}, False
    return {"step": name, "ok": ok, "seconds": round(time.perf_counter() - begun, 1), **found}


def run_limited(command: list[str], *, limit: float, **settings: Any) -> tuple[int | None, str, str]:
    """Run a program, and end it with all that it has started if it takes longer than `limit` seconds.

    Returns:
        Its exit code, None if it was ended; what it printed; and its errors.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.Popen(command, start_new_session=True, **pipes, **settings)
    try:
        out, errors = program.communicate(timeout=limit)
        return program.returncode, out, errors
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        out, errors = program.communicate()
        return None, out, errors


def be_step(name: str, machine: Machine) -> int:
    """Do one step in this process."""
    try:
        found = STEPS[name].run(machine)
    except Exception as error:
        traceback.print_exc()
        print("FIGURES " + json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}), flush=True)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print("FIGURES " + json.dumps(found), flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="the same code, small, on the CPU")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), help="these steps alone")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    return parser.parse_args()
