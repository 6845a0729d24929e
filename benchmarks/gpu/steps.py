"""Shared code of the runs on GPUs: steps with limits in their own processes, lines of JSON, a verdict.

A program names its steps with `step`, and ends in `main`. A dry run skips the features of cards, and says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event, Timer
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
Figures = dict[str, Any]
RESULT, FIGURES = "RESULT ", "FIGURES "
"""Prefixes of the lines that a step's process writes for its parent: for a case, and for the step."""
TO_START, TO_END = 15.0, 5.0
"""Seconds below which no step is started, and those that are kept for the end of a run."""
SLOWER = 4
"""The factor by which a dry run extends the limit of each step."""
NNX = [sys.executable, "-m", "nnx"]
"""The command ``nnx`` as a module, in case its script is not on the path."""


@dataclass(frozen=True)
class Machine:
    """The machine and the model of the steps.

    Attributes:
        accelerator: Lightning's accelerator name, ``"cuda"`` or ``"cpu"``.
        layers: The number of blocks of the trained GPT.
        width: The size of its token vectors.
        batch: The number of sequences in a step.
        context: The number of tokens in a sequence.
    """

    accelerator: str
    layers: int
    width: int
    batch: int
    context: int

    @property
    def is_card(self) -> bool:
        """Return True if the machine has a card (False in a dry run)."""
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


def each(cases: Iterable[str], run: Callable[[str], Figures], *, may_fail: Container[str] = ()) -> Figures:
    """Run a function for each case and write its figures at once; failures are raised after the last.

    Args:
        cases: The names of the cases.
        run: Returns the figures of one.
        may_fail: Cases of others, whose failures are written and do not fail the step.

    Raises:
        FailedError: Cases have failed, when all have had their turn.
    """
    failed, done = [], 0
    for case in cases:
        begun = time.perf_counter()
        try:
            figures = run(case)
            done += 1
        except Exception as error:
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {error}"[:1000]}
            if case not in may_fail:
                failed.append(case)
        figures["seconds"] = round(time.perf_counter() - begun, 1)
        print(RESULT + json.dumps({"case": case, **figures}), flush=True)
    expect(not failed, f"failed: {', '.join(failed)}")
    return {"cases": done}


def main(card: Machine, small: Machine, *, cards: int, seconds: float = math.inf) -> int:
    """Run the steps, each in its own processes, or one step if this process is one of these.

    Args:
        card: The machine of a run on cards.
        small: The machine of a dry run.
        cards: The minimum number of cards.
        seconds: The time limit of a run on cards; later steps are skipped.

    Returns:
        The exit code.
    """
    arguments = parse_arguments(seconds)
    machine = small if arguments.dry_run else card
    if arguments.step:
        return be_step(arguments.step, machine)
    if machine.is_card and torch.cuda.device_count() < cards:
        print(f"This needs {cards} GPUs; --dry-run tries the same code on the CPU.", file=sys.stderr)
        return 2
    write = Results(arguments.out)
    write({"machine": machine.name, "torch": torch.__version__, "python": sys.version.split()[0]})
    verdict = run_steps(arguments.only or list(STEPS), machine, arguments.seconds, write)
    print(f"{machine.name}: {verdict}", flush=True)
    return int(verdict.startswith("failed"))


class Results:
    """Writes each result as a line of JSON when it comes.

    Args:
        path: A file for the lines, beside standard output.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def __call__(self, figures: Figures) -> None:
        """Write one."""
        line = json.dumps(figures)
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def run_steps(names: list[str], machine: Machine, seconds: float, write: Results) -> str:
    """Run steps one after the other, as long as there is time; say how that went."""
    end = time.monotonic() + (seconds if machine.is_card else math.inf)
    failed, left_out = [], []
    for name in names:
        limit = STEPS[name].limit if machine.is_card else STEPS[name].limit * SLOWER
        limit = min(limit, end - time.monotonic() - TO_END)
        if limit < TO_START:
            left_out.append(name)
            write({"step": name, "left out": "no time is left"})
            continue
        found = run_step(name, machine, limit, write)
        write(found)
        if not found["ok"]:
            failed.append(name)
    verdict = f"failed: {', '.join(failed)}" if failed else "all that ran is as promised"
    return verdict + (f"; no time for {', '.join(left_out)}" if left_out else "")


def run_step(name: str, machine: Machine, limit: float, write: Results) -> Figures:
    """Run one step in its own processes. Return its figures, or the reason for its failure.

    Args:
        name: The step's name.
        machine: The machine to run on.
        limit: The seconds after which its processes are killed.
        write: Receives the results of its cases as they come.
    """
    begun = time.perf_counter()
    command = [sys.executable]
    if ranks := STEPS[name].ranks:
        ranks = min(ranks, torch.cuda.device_count() if machine.is_card else 2)
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [sys.argv[0], "--step", name, *([] if machine.is_card else ["--dry-run"])]
    if not machine.is_card:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is too small for threads
    found: Figures = {}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        program = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        ended = Event()
        timer = Timer(limit, lambda: (ended.set(), os.killpg(program.pid, signal.SIGKILL)))
        timer.start()
        for line in program.stdout or ():
            if line.startswith(RESULT):
                write({"step": name, **json.loads(line[len(RESULT) :])})
            elif line.startswith(FIGURES):
                found = json.loads(line[len(FIGURES) :])
        ok = program.wait() == 0 and bool(found)
        timer.cancel()
        errors.seek(0)
        if not ok and not found:
            found = {"error": errors.read()[-2000:]}
    if ended.is_set():
        found, ok = {"error": f"it was stopped after {limit:.0f} s"}, False
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
        print(FIGURES + json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}), flush=True)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(FIGURES + json.dumps(found), flush=True)
    return 0


def parse_arguments(seconds: float) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="the same code, small, on the CPU")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), help="these steps alone")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON, too")
    parser.add_argument("--seconds", type=float, default=seconds, help="end a run on cards after so many")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    return parser.parse_args()
