"""Runs of Trainer and Fabric that save in the background."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import nnx
import nnx_checkpoint as storage
from jobs.lightning_checkpoint_jobs import keep_best
from nnx_checkpoint.format import inflight
from nnx_core.errors import NnxError
from nnx_test_helpers import lightning_jobs
from nnx_test_helpers.async_jobs import delayed
from nnx_test_helpers.fabric_jobs import model_and_optimizer, step
from nnx_test_helpers.lightning_jobs import OPTIONS, QUIET, rank
from nnx_test_helpers.training import MODELS, Net, Outcome, Run, make_trainer, train

ASYNC = {**OPTIONS, "async_save": True}


class At(Callback):
    """Does something after one step."""

    def __init__(self, step: int, action: Callable[[Trainer], object]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.action(trainer)


def trainer_of(run: Run, *callbacks: Callback) -> Trainer:
    """A Trainer that saves in the background, under our strategies or under Lightning's."""
    extra: dict[str, Any] = {}
    if run.strategy == "ddp":
        extra["plugins"] = [nnx.CheckpointIO(async_save=True)]
    return make_trainer(run, callbacks=list(callbacks), **extra)


def save_late(run: Run, until: int) -> tuple[Outcome, bool]:
    """Train; the save that is requested in the middle begins only after step `until`.

    Returns:
        The run's report, and True if the save was still in flight at that step.
    """
    gate, held = threading.Event(), []

    def release(trainer: Trainer) -> None:
        save = inflight.current()
        held.append(save is not None and not save.done())
        gate.set()

    with delayed(lambda: gate.wait(60)):
        return train(run, callbacks=[At(until, release)]), held == [True] or rank() > 0


def save_late_beside_ddp(run: Run, until: int) -> bool:
    """The same under Lightning's own strategy, where only rank 0 saves."""
    gate, held = threading.Event(), []

    def release(trainer: Trainer) -> None:
        save = inflight.current()
        held.append(save is not None and not save.done())
        gate.set()

    save = At(int(run.save_at or 0), lambda trainer: trainer.save_checkpoint(str(run.save)))
    with delayed(lambda: gate.wait(60)):
        trainer_of(run, save, At(until, release)).fit(MODELS[run.model](run))
    return held == [rank() == 0]


def keep_best_in_background(devices: int, folder: str, save_last: Any) -> dict[str, Any]:
    """`keep_best` with saves that take longer than the steps between them."""
    lightning_jobs.OPTIONS["async_save"] = True
    try:
        with delayed(lambda: time.sleep(0.1)):
            return keep_best("fsdp_auto", devices, folder, save_last)
    finally:
        del lightning_jobs.OPTIONS["async_save"]


@dataclass
class Left:
    """The checkpoints and logs that a run with ModelCheckpoint leaves."""

    names: list[str]
    best: str
    most_at_once: int
    least_after_first: int


def keep_one(run: Run, folder: str) -> Left:
    """Keep one checkpoint of many, and look at every step how many complete ones there are."""
    complete: list[int] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            complete.append(sum(path.is_file() for path in Path(folder).glob("*/manifest.json")))

    saver = ModelCheckpoint(dirpath=folder, save_top_k=1, every_n_train_steps=1, filename="{step}")
    extra: dict[str, Any] = {"callbacks": [Look(), saver]}
    if run.strategy == "ddp":
        extra["plugins"] = [nnx.CheckpointIO(async_save=True)]
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False}
    settings["max_steps"] = run.steps
    strategy = nnx.strategy(run.strategy, **run.options) if run.options else run.strategy
    with delayed(lambda: time.sleep(0.05)):
        Trainer(strategy=strategy, devices=run.devices, **settings, **extra).fit(Net(run))
    seen = complete[next((i for i, count in enumerate(complete) if count), len(complete)) :]
    names = sorted(path.name for path in Path(folder).iterdir())
    return Left(names, Path(saver.best_model_path).name, max(seen, default=0), min(seen, default=0))


def fail(run: Run, at: int, slow_rank: int) -> tuple[int, str, str, bool]:
    """Save to a place where nothing can be saved; one rank begins with it when two more steps are done.

    Returns:
        The step at which the run ended on this rank, the error's class and text, and whether anything
        was left in flight.
    """
    save = At(at, lambda trainer: trainer.save_checkpoint(str(run.save)))
    trainer = trainer_of(run, save)
    name = text = ""

    def wait() -> None:
        if rank() == slow_rank:
            time.sleep(0.2)
            while trainer.global_step < min(at + 2, run.steps):
                time.sleep(0.01)

    with delayed(wait):
        try:
            trainer.fit(SlowNet(run))
        except NnxError as error:
            name, text = type(error).__name__, str(error)
    return trainer.global_step, name, text, inflight.current() is not None


class SlowNet(Net):
    """Takes some time for a step."""

    def training_step(self, batch: Any, index: int) -> Any:
        time.sleep(0.03)
        return super().training_step(batch, index)


def interrupt(run: Run, error: Literal["ValueError", "KeyboardInterrupt"]) -> str:
    """Raise an error in user code while a save is in flight; return the error of `fit`."""
    handler = signal.getsignal(signal.SIGINT)

    def stop(trainer: Trainer) -> None:
        save = inflight.current()
        assert (run.strategy == "ddp" and rank() > 0) or (save is not None and not save.done())
        raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[error]("the user's")

    save = At(2, lambda trainer: trainer.save_checkpoint(str(run.save)))
    with delayed(lambda: time.sleep(0.3)):
        try:
            trainer_of(run, save, At(3, stop)).fit(Net(run))
        except (Exception, SystemExit) as caught:
            return f"{type(caught).__name__}: {caught}; {inflight.current()}"
        finally:
            signal.signal(signal.SIGINT, handler)
    return "no error"


def save_after(run: Run, path: str) -> tuple[bool, bool, bool]:
    """Save after a run, with no work to overlap, and once more in a second run.

    Returns:
        True if the first save was complete on return, True if the copy's memory was then freed, and True if
        the second save was in flight on return.
    """
    from nnx_checkpoint.writing import background

    save = At(1, lambda trainer: trainer.save_checkpoint(str(run.save)))
    module = Net(run)
    trainer = trainer_of(run, save)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    complete = inflight.current() is None
    freed = background._arena.nbytes == 0
    in_flight = []

    def save_again(trainer: Trainer) -> None:
        trainer.save_checkpoint(str(run.save))
        in_flight.append(inflight.current() is not None)

    again = replace(run, steps=2)
    second = trainer_of(again, At(2, save_again))
    if run.strategy == "ddp":
        second.strategy.checkpoint_io = trainer.strategy.checkpoint_io
    second.fit(module)
    return complete, freed, in_flight == [run.strategy != "ddp" or rank() == 0]


def fabric(devices: int, folder: str) -> dict[str, Any]:
    """Save in a loop of Fabric's, change the weights, load; then fail."""
    strategy = nnx.strategy("fsdp_auto", namespace="lightning.fabric", **ASYNC)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices)
    fabric.launch()
    model, optimizer = fabric.setup(*model_and_optimizer())
    report: dict[str, Any] = {"losses": [step(fabric, model, optimizer, index) for index in range(2)]}
    gate = threading.Event()
    with delayed(lambda: gate.wait(60)):
        fabric.save(f"{folder}/a", {"model": model, "optimizer": optimizer, "step": 2})
        save = inflight.current()
        report["first"] = [step(fabric, model, optimizer, index) for index in range(2, 4)]
        report["in flight"] = save is not None and not save.done()
        gate.set()
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/a", state)
    report["step"] = state["step"]
    report["second"] = [step(fabric, model, optimizer, index) for index in range(2, 4)]
    fabric.save(f"{folder}/file", {"model": model})
    report["error"] = (-1, "")
    for index in range(500):
        try:
            step(fabric, model, optimizer, index % 10)
        except NnxError as error:
            report["error"] = (index, str(error))
            break
    report["left"] = inflight.current() is None
    strategy.teardown()
    return report


def verified(path: str) -> tuple[list[storage.Damage], int]:
    """Return the damage of a checkpoint, and its step."""
    return storage.verify(path), int(storage.open_checkpoint(path).objects["trainer"]["global_step"])
