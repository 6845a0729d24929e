"""Runs of Trainer that copy their state to memory, and processes of them that get killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

import nnx
from nnx_base.shard import Shard
from nnx_checkpoint.format.manifest import is_save_id
from nnx_checkpoint.memory import copies
from nnx_core.lightning.memory import MemoryCopies
from nnx_test_helpers.lightning_jobs import rank
from nnx_test_helpers.training import MODELS, Run, SaveAt, make_trainer


@dataclass
class Report:
    """What a run reports.

    Attributes:
        start: The step after which it began.
        losses: The losses of its steps.
        before: The digest of this rank's state when training began.
        digests: The same after each step.
        log: What was logged about copies.
    """

    start: int = 0
    losses: list[float] = field(default_factory=list)
    before: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def directory(folder: str, hosts: int, size: int) -> str:
    """The memory of this rank's pretended host: ranks of one host share it, and no others."""
    path = Path(folder) / f"host{rank() * hosts // size}"
    path.mkdir(exist_ok=True)
    return str(path)


class Watcher(Callback):
    """Notes the state at the start and after each step; kills this process on request."""

    def __init__(self, report: Report, folder: str, kill: tuple[int, int] | None) -> None:
        self.report, self.folder, self.kill = report, Path(folder), kill

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.report.start, self.report.before = trainer.global_step, digest(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        found = digest(trainer)
        self.report.digests[trainer.global_step] = found
        (self.folder / f"state-{trainer.global_rank}-{trainer.global_step}").write_text(found)
        if self.kill == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def digest(trainer: Any) -> str:
    """A hash of this rank's part of the weights and of the optimizer state."""
    strategy, found = trainer.strategy, hashlib.sha256()
    state = {"model": strategy.lightning_module_state_dict()}
    state["optimizers"] = [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
    for value in tensors(state):
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tree that are on this rank."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Shard):
        yield from value.data
    elif isinstance(value, torch.Tensor):
        yield value


def train(
    run: Run,
    folder: str,
    *,
    hosts: int = 1,
    kill: tuple[int, int] | None = None,
    every: int = 3,
    saves: bool = False,
    callbacks: tuple[Callback, ...] = (),
) -> Report:
    """Train with a copy after every few steps.

    Args:
        run: What to train.
        folder: Where pretended hosts have their memory.
        hosts: How many hosts the ranks are on.
        kill: The rank that kills itself, and after which step.
        every: The interval of copies.
        saves: Whether the run saves to disk, too.
        callbacks: Further callbacks.
    """
    report = Report()
    logging.getLogger("nnx.memory").addHandler(handler := Lines(report.log))
    logging.getLogger("nnx.memory").setLevel(logging.INFO)
    memory = directory(folder, hosts, run.devices)
    options = {**run.options, "memory_checkpoint": every, "memory_directory": memory}
    watcher, saving = Watcher(report, folder, kill), [SaveAt(run)] if saves else []
    trainer = make_trainer(Run(**{**vars(run), "options": options}), callbacks=[*saving, *callbacks, watcher])
    module = MODELS[run.model](run)
    try:
        trainer.fit(module, ckpt_path=run.resume)
    finally:
        logging.getLogger("nnx.memory").removeHandler(handler)
        for each in trainer.callbacks:
            if isinstance(each, MemoryCopies):
                each.copies.close()  # the worker lives on, unlike a process of a run
    report.losses = module.losses
    return report


def call(run: Run, folder: str, more: dict[str, Any]) -> Report:
    """Train in a worker whose earlier jobs do not count, as in a new process."""
    copies._numbers = itertools.count(1)
    return train(run, folder, **more)


def fit(run: Run) -> None:
    """Train with the options of the run alone."""
    options = {**run.options, "memory_checkpoint": 3}
    make_trainer(Run(**{**vars(run), "options": options})).fit(MODELS[run.model](run))


def with_own_io() -> None:
    """Give the option to the wrong one of two."""
    run = Run()
    make_trainer(run, plugins=[nnx.CheckpointIO(memory_checkpoint=2)]).fit(MODELS[run.model](run))


class Filler(Callback):
    """Fills the memory of a host after a step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            with suppress(OSError), Path(self.path).open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()


class Counter(Callback):
    """Counts the copies in the memory of the fullest host after each step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            hosts = self.folder.glob("host*/nnx-*/*")
            most = max(len([each for each in host.iterdir() if is_save_id(each.name)]) for host in hosts)
            with (self.folder / "counts").open("a") as file:
                file.write(f"{most}\n")


class Lines(logging.Handler):
    """Collects messages."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def recorded(folder: Path, rank: int, step: int) -> str:
    """The digest that a rank of an earlier start wrote after a step."""
    return (folder / f"state-{rank}-{step}").read_text()


def damage(folder: Path, name: str, *, host: str = "host*") -> int:
    """Change a byte in every copy of a file; how many there were."""
    found = [path for each in folder.glob(host) for path in each.rglob(name) if path.is_file()]
    for path in found:
        raw = bytearray(path.read_bytes())
        raw[-len(raw) // 8] ^= 1
        path.write_bytes(raw)
    return len(found)


def step_of(folder: Path) -> set[int]:
    """The steps of the committed copies."""
    found = folder.glob("host*/nnx-*/*/*/manifest.json")
    return {json.loads(path.read_bytes())["provenance"]["step"] for path in found}
