"""Kill ranks at random moments; the next processes must resume, bit by bit, from the copies in memory.

    python benchmarks/kill_copies.py [--strategy all] [--memory-checkpoint 5] [--kills 60] [--seed 1]
                                     [--hosts 2] [--torchrun] [--stall [--tensors 200]] [--json]

A run trains a small model with dropout on two ranks, under fsdp_auto, nnscaler_zero, colossalai and ddp, or
one of them. At a random moment a rank, or all, get SIGKILL: in a step, while a copy is written, or while a
copy is restored. All ranks are started again, until the run ends, and then another run begins. First a run is
trained without kills. Checked are the steps that had to be computed again (at most those between two copies),
and that each rank's weights, optimizer state and loss are the same bits after each step as in the first run.
A step counts as computed when its hooks have ended.

Processes are forked from one that has imported everything; with ``--torchrun`` torchrun starts and restarts
them. Hosts are pretended: each has a directory of its own in memory, and ranks see only that of their host.
``--stall`` measures, without kills and with a larger model of so many parameter tensors, how long training
waits for a copy: the processor time of the copy and all time that the next step waits for its end, beside the
processor time of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

STRATEGIES = ("fsdp_auto", "nnscaler_zero", "colossalai", "ddp")
RANKS = 2
STEPS = 40
STALL_STEPS = 24
DEADLINE = 180.0
"""Seconds within which a start must train its first step, on a busy machine."""


class LostError(Exception):
    """A run did not resume as it must."""


@dataclass(frozen=True)
class Size:
    """The size of a model: its layers of one width, the samples of a batch, and the passes of a step."""

    width: int = 32
    layers: int = 2
    batch: int = 4
    passes: int = 1


SIZES = {0: Size(), 16: Size(256, 8, 256, 9), 200: Size(64, 100, 256, 3)}
"""The model that is killed, and larger ones by the number of their tensors; their step takes about 200 ms."""


def module_of(size: Size) -> Any:
    """A model with dropout, and its data."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn

    width, batch = size.width, size.batch

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            blocks = [
                nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(size.layers)
            ]
            self.body = nn.Sequential(*blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            x = batch[0]
            for _ in range(size.passes):
                x = self(x)
            return (x - batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            data = torch.randn(STEPS * batch * RANKS, width, generator=generator)
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch, shuffle=True)

    return Net()


def train(strategy: str, folder: str, every: int, hosts: int, boot: int, heavy: int) -> None:
    """Train on this rank, and log every step. Runs in processes of their own."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    import nnx

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = Path(folder) / f"host{rank * hosts // ranks}"
    memory.mkdir(exist_ok=True)
    log = (Path(folder) / f"log-{rank}").open("a", buffering=1)

    def say(**event: Any) -> None:
        log.write(json.dumps({"boot": boot, "time": time.monotonic(), **event}) + "\n")

    class Log(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            say(resumed=trainer.global_step, state="" if heavy else digest(trainer))

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            self.loss = float(outputs["loss"])
            if heavy:
                trainer.strategy.barrier()  # what a rank waits for a slower one is not the copy's
                self.before = time.perf_counter(), time.thread_time()

    say(pid=os.getpid())
    seed_everything(5, verbose=False)
    module, noting = module_of(SIZES[heavy]), Log()

    def after_step(*_: Any) -> None:  # the module's hook, which follows those of all callbacks
        if heavy:  # only the copy's callback was called in between
            now = time.perf_counter(), time.thread_time()
            stall = [1e3 * (after - before) for before, after in zip(noting.before, now, strict=True)]
            say(step=module.trainer.global_step, stall=stall, processor=time.thread_time())
            return
        say(step=module.trainer.global_step, state=digest(module.trainer), loss=noting.loss)

    module.on_train_batch_end = after_step
    options = {"memory_checkpoint": every, "memory_directory": str(memory)} if every else {}
    trainer = Trainer(
        strategy=nnx.strategy(strategy, **options),
        accelerator="cpu",
        devices=ranks,
        max_steps=STALL_STEPS if heavy else STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[noting],
    )
    trainer.fit(module)
    say(ended=True)


def digest(trainer: Any) -> str:
    """A hash of this rank's part of the weights and of the optimizer state."""
    import torch

    strategy, found = trainer.strategy, hashlib.sha256()
    states = [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
    for value in tensors([strategy.lightning_module_state_dict(), states]):
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def tensors(value: Any) -> Iterator[Any]:
    """All tensors of a tree that are on this rank."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "boxes"):
        yield from value.data
    elif hasattr(value, "untyped_storage"):
        yield value


# The starter and the killer.


@dataclass
class Logs:
    """The lines that the ranks of a run have logged so far."""

    folder: Path

    def read(self) -> list[list[dict[str, Any]]]:
        """The events of each rank; a line that is being written does not count."""
        found = []
        for rank in range(RANKS):
            path = self.folder / f"log-{rank}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            found.append([json.loads(line) for line in lines])
        return found

    def wait_for(self, key: str, boot: int, rank: int, alive: threading.Event) -> dict[str, Any] | None:
        """The first event of a kind that a rank logs in a start; None if the start ends before."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            over = not alive.is_set()
            for event in self.read()[rank]:
                if event["boot"] == boot and key in event:
                    return event
            if over:
                return None
            time.sleep(0.01)
        raise LostError(f"start {boot} did not come to {key!r} within {DEADLINE:.0f} s")


@dataclass
class Result:
    """The outcome of the kills of one strategy."""

    kills: int = 0
    runs: int = 0
    again: list[int] = field(default_factory=list)
    from_memory: int = 0
    seconds: float = 0.0


class Starter:
    """Starts the ranks of runs, by forks or by torchrun, and kills one of them in each start."""

    def __init__(self, options: argparse.Namespace, dice: random.Random) -> None:
        self.options, self.dice = options, dice
        self.pool: Any = None
        if not options.torchrun:
            from nnx_conformance.pool import PRELOAD, WorkerPool

            self.pool = WorkerPool(RANKS, preload=PRELOAD)

    def run(self, strategy: str, folder: Path, *, kills: int, window: float) -> int:
        """Train one run to its end; how many kills there were.

        Args:
            strategy: The strategy.
            folder: Where it logs, and where hosts have their memory.
            kills: The number of kills at most.
            window: The seconds within which a kill comes, from the first step on.
        """
        done, boot = 0, 0
        process = self._torchrun(strategy, folder) if self.options.torchrun else None
        while True:
            killed = self._start(strategy, folder, boot, window if done < kills else 0.0, process)
            done += killed
            boot += 1
            if all(any("ended" in event for event in events) for events in Logs(folder).read()):
                break
            if not killed:
                raise LostError(f"{strategy}: start {boot - 1} ended by itself; see {folder}/output")
        if process is not None and process.wait(DEADLINE):
            raise LostError(f"{strategy}: torchrun ended with {process.returncode}; see {folder}/output")
        return done

    def _start(
        self, strategy: str, folder: Path, boot: int, window: float, process: subprocess.Popen[bytes] | None
    ) -> bool:
        """Let one start of the ranks run to its end or to a kill; whether it was killed."""
        alive, killed = threading.Event(), []
        alive.set()
        killer = threading.Thread(target=lambda: killed.append(self._kill(folder, boot, window, alive)))
        killer.start()
        if process is not None:
            killer.join()
            if not killed[0]:
                process.wait(DEADLINE)
            alive.clear()
            return bool(killed[0])
        from nnx_conformance.pool import JobError

        arguments = (strategy, str(folder), self.options.memory_checkpoint, self.options.hosts, boot, 0)
        try:
            self.pool.run(train, *arguments, world_size=RANKS, env={"NNX_RUN_ID": folder.name}, end_after=1.0)
        except JobError as error:
            (folder / "output").open("a").write(f"{error}\n")
        alive.clear()
        killer.join()
        for events in Logs(folder).read():  # a starter ends all processes before it starts others
            for event in events:
                if event["boot"] == boot and "pid" in event:
                    _end(event["pid"])
        return bool(killed[0])

    def _kill(self, folder: Path, boot: int, window: float, alive: threading.Event) -> bool:
        """Kill a random rank, or all of them, at a random moment of a start."""
        if not window:
            Logs(folder).wait_for("ended", boot, 0, alive)
            return False
        victim = self.dice.randrange(RANKS + 1)
        victims = range(RANKS) if victim == RANKS else [victim]
        restoring = self.dice.random() < 1 / 6
        for rank in range(RANKS):
            if Logs(folder).wait_for("pid" if restoring else "resumed", boot, rank, alive) is None:
                return False
        time.sleep(self.dice.uniform(0, window))
        logged = Logs(folder).read()
        if any("ended" in event for event in logged[0]) or not alive.is_set():
            return False
        for rank in victims:
            _end(next(each["pid"] for each in logged[rank] if each["boot"] == boot and "pid" in each))
        return True

    def _torchrun(self, strategy: str, folder: Path) -> subprocess.Popen[bytes]:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        mine = [__file__, "--worker", strategy, str(folder), *sys.argv[1:]]
        return subprocess.Popen(
            [sys.executable, *words, "--max-restarts=1000", "--monitor-interval=0.1", *mine],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=(folder / "output").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        """End all processes."""
        if self.pool is not None:
            self.pool.close()


def _end(pid: int) -> None:
    """Kill a process, and wait until it is dead (its starter may not have noticed)."""
    try:
        os.kill(pid, signal.SIGKILL)
        state = Path(f"/proc/{pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] not in "ZX" or _has_threads(pid):
            time.sleep(0.005)
    except (ProcessLookupError, FileNotFoundError):
        return


def _has_threads(pid: int) -> bool:
    return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1


def check(folder: Path, whole: list[dict[int, tuple[str, float]]], every: int, result: Result) -> None:
    """Hold the log of a run with kills against that of the run without.

    Args:
        folder: The run's folder.
        whole: For each rank, state and loss after each step of the run without kills.
        every: The interval of copies.
        result: Gets what came of it.
    """
    logged = Logs(folder).read()
    boots = sorted({event["boot"] for event in logged[0]})
    last = 0
    for boot in boots:
        of_boot = [[event for event in events if event["boot"] == boot] for events in logged]
        began = {event["resumed"] for events in of_boot for event in events if "resumed" in event}
        if len(began) > 1:
            raise LostError(f"ranks resumed at different steps: {began}")
        if began and boot > 0:
            again = last - min(began)
            if again > every:
                raise LostError(f"{again} steps were computed again, after step {last} (start {boot})")
            result.again.append(again)
            result.from_memory += min(began) > 0
        for rank, events in enumerate(of_boot):
            for event in events:
                step = event.get("step", event.get("resumed"))
                expected = whole[rank].get(step) if step else None
                if expected is not None and event["state"] != expected[0]:
                    raise LostError(f"rank {rank} has another state after step {step} (start {boot})")
                if expected is not None and "loss" in event and event["loss"] != expected[1]:
                    raise LostError(f"rank {rank} has another loss in step {step} (start {boot})")
        steps = [event["step"] for events in of_boot for event in events if "step" in event]
        last = max(steps, default=min(began, default=last))
    if last != STEPS:
        raise LostError(f"the run ended after step {last} of {STEPS}")


def steps_of(folder: Path) -> list[dict[int, tuple[str, float]]]:
    """State and loss of each rank after each step."""
    return [
        {event["step"]: (event["state"], event["loss"]) for event in events if "step" in event}
        for events in Logs(folder).read()
    ]


def kill_ranks(strategy: str, options: argparse.Namespace, scratch: Path) -> Result:
    """Run and kill until there were enough kills."""
    starter = Starter(options, random.Random(options.seed))
    result, begun = Result(), time.monotonic()
    try:
        folder = scratch / f"{strategy}-whole"
        folder.mkdir()
        starter.run(strategy, folder, kills=0, window=0.0)
        whole = steps_of(folder)
        times = [event["time"] for event in Logs(folder).read()[0] if "step" in event]
        window = 3 * options.memory_checkpoint * (times[-1] - times[0]) / (len(times) - 1)
        while result.kills < options.kills:
            folder = scratch / f"{strategy}-{result.runs}"
            folder.mkdir()
            result.kills += starter.run(strategy, folder, kills=options.kills - result.kills, window=window)
            result.runs += 1
            check(folder, whole, options.memory_checkpoint, result)
            left = [each.name for each in folder.glob("host*/*")]
            if left and options.torchrun:
                raise LostError(f"a run that ended left {left} in memory")
            shutil.rmtree(folder)
    finally:
        starter.close()
    result.seconds = time.monotonic() - begun
    return result


def measure_stall(strategy: str, options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Train a larger model with and without copies; medians in milliseconds, by clock and processor."""
    from nnx_conformance.pool import PRELOAD, WorkerPool

    found: dict[str, list[float]] = {}
    with WorkerPool(RANKS, preload=PRELOAD) as pool:
        for number in range(2):
            for name, every in (("without", 0), ("with", options.memory_checkpoint)):
                folder = scratch / f"{strategy}-stall-{name}-{number}"
                folder.mkdir()
                arguments = (strategy, str(folder), every, options.hosts, 0, options.tensors)
                pool.run(train, *arguments, world_size=RANKS, env={"NNX_RUN_ID": folder.name}, timeout=500.0)
                steps = [event for event in Logs(folder).read()[0] if "step" in event][3:]
                for before, after in pairwise(steps):
                    found.setdefault(f"step {name}", []).append(1e3 * (after["time"] - before["time"]))
                    found.setdefault(f"processor {name}", []).append(
                        1e3 * (after["processor"] - before["processor"])
                    )
                for event in steps if every else []:
                    # The step after a copy waits for its end; all that it waits counts, idle or not.
                    kind = {0: "copy", 1: "wait"}.get(event["step"] % every)
                    if kind:
                        found.setdefault(kind, []).append(event["stall"][0])
                        found.setdefault(f"processor {kind}", []).append(event["stall"][1])
    return {name: statistics.median(values) for name, values in found.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="all", choices=["all", *STRATEGIES])
    parser.add_argument("--memory-checkpoint", type=int, default=5)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=2, choices=[1, 2])
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--tensors", type=int, default=16, choices=[16, 200])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the trials; the exit code is 1 if anything was lost."""
    options = _arguments()
    if options.worker:
        strategy, folder = options.worker
        boot = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        train(strategy, folder, options.memory_checkpoint, options.hosts, boot, 0)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    scratch = Path(tempfile.mkdtemp(prefix="nnx-kills-", dir="/dev/shm"))
    chosen = STRATEGIES if options.strategy == "all" else (options.strategy,)
    results: dict[str, Any] = {}
    try:
        for strategy in chosen:
            results[strategy] = (measure_stall if options.stall else kill_ranks)(strategy, options, scratch)
            print(_line(strategy, results[strategy]), flush=True)
    except LostError as error:
        print(f"LOST: {strategy}: {error}", flush=True)
        output = sorted(scratch.glob("*/output"))
        print("".join(each.read_text()[-3000:] for each in output[-1:]), file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.stall:
        worst = max(
            (each["processor copy"] + each["wait"]) / each["processor without"] for each in results.values()
        )
        print(f"{'OK' if worst <= 0.05 else 'TOO LONG'}: a copy stalls {100 * worst:.1f} % of a step at most")
        raise SystemExit(worst > 0.05)
    if options.json:
        print(json.dumps({name: vars(result) for name, result in results.items()}))
    kills = sum(result.kills for result in results.values())
    again = max(max(result.again, default=0) for result in results.values())
    print(f"OK: {kills} kills, 0 lost, at most {again} steps computed again, every state equal bit by bit")


def _line(strategy: str, result: Any) -> str:
    if isinstance(result, Result):
        mean = statistics.fmean(result.again) if result.again else 0.0
        return (
            f"{strategy}: {result.kills} kills in {result.runs} runs, {result.from_memory} starts from "
            f"copies, {mean:.1f} steps again on average, {max(result.again, default=0)} at most, "
            f"{result.seconds:.0f} s"
        )
    copied = f"{result['processor copy']:.1f} ms of the processor ({result['copy']:.1f} ms by the clock)"
    step = (
        f"{result['processor without']:.0f} ms of the processor ({result['step without']:.0f} ms by the clock"
    )
    return (
        f"{strategy}: a copy takes {copied}, and the next step waits {result['wait']:.1f} ms for it; "
        f"a step takes {step}, {result['step with']:.0f} ms with copies)"
    )


if __name__ == "__main__":
    main()
