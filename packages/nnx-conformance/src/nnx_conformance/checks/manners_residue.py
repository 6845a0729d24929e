"""What a strategy leaves behind: several runs in one process, and the process after training."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor

import nnx_core
from nnx_base._torch_compat import process_groups
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import OF_LAUNCHERS, Loop, fit, make_trainer, train, trainer_settings

# The two copies of Lightning: `lightning.*`, and `pytorch_lightning` with `lightning_fabric`.
#
# They are separate module trees, so a strategy has to be made for the one that asks.


REPEATED = Task()


@check("trainer", kinds=("backend", "lightning"), of_adapter=True)
def pytorch_lightning(bench: Bench) -> None:
    """It works with Trainer of `pytorch_lightning` as with that of `lightning.pytorch`."""
    alone = bench.train_alone(REPEATED)
    for rank, losses in enumerate(bench.run(fit_in_other_copy, REPEATED)):
        where = f"pytorch_lightning, rank {rank}"
        expect_equal_losses(losses, alone.losses, tolerance=TOLERANCE[REPEATED.dtype], where=where)


@check("fabric", kinds=("backend", "lightning"), of_adapter=True)
def lightning_fabric(bench: Bench) -> None:
    """It works with Fabric of `lightning_fabric` as with that of `lightning.fabric`."""
    loop = Loop()
    alone = bench.alone(train, loop)
    for rank, seen in enumerate(bench.run(train, loop, "lightning_fabric")):
        where = f"lightning_fabric, rank {rank}"
        expect_equal_losses(seen.losses, alone.losses, tolerance=TOLERANCE["float32"], where=where)


def fit_in_other_copy(subject: Subject, task: Task) -> list[float]:
    """Train the plain model as a LightningModule of `pytorch_lightning`; the losses."""
    tree = importlib.import_module("pytorch_lightning")
    base: Any = tree.LightningModule

    class Wrapped(base):  # type: ignore[misc] # its base is known only now
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain(task)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(x)  # type: ignore[no-any-return]

        def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"x": batch[0]}

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.plain.training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return self.plain.optimizer(self.parameters())

        def train_dataloader(self) -> Any:
            from nnx_conformance.task import loader

            return loader(task, self.trainer)

    module = Wrapped()
    trainer = tree.Trainer(**trainer_settings(subject, task, namespace="pytorch_lightning"))
    trainer.fit(module)
    return list(module.plain.losses)


TOLERATED = TOLERANCE[REPEATED.dtype]


@check()
def two_trainers(bench: Bench) -> None:
    """A second Trainer in the same process trains as the first."""
    alone = bench.train_alone(REPEATED)
    first, second = zip(*bench.run(train_twice), strict=True)
    expect_same_run(first, alone, tolerance=TOLERATED, what="the first Trainer")
    expect_same_run(second, alone, tolerance=TOLERATED, what="the second Trainer")


@check()
def beside_another_strategy(bench: Bench) -> None:
    """It works in a process in which another strategy was used, and that one works after it."""
    alone = bench.train_alone(REPEATED)
    own, other = zip(*bench.run(train_beside), strict=True)
    expect_same_run(own, alone, tolerance=TOLERATED, what="after 'ddp'")
    expect_same_run(other, alone, tolerance=TOLERATED, what="'ddp' after it")


@check(of_adapter=True)
def pickled_object(bench: Bench) -> None:
    """The object of ``nnx.strategy(NAME)`` can be pickled, as spawning needs it, and trains like the name."""
    ranks = bench.run(train_with_pickled)
    expect_same_run(ranks, bench.train_alone(REPEATED), tolerance=TOLERATED)


@check(of_adapter=True)
def agreed_stop(bench: Bench) -> None:
    """When one rank wants to stop, ``reduce_boolean_decision`` makes all stop after the same step."""
    alone = bench.train_alone(Task(steps=2))
    expect_same_run(bench.run(stop_early), alone, tolerance=TOLERATED)


def train_twice(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train two modules with a Trainer each."""
    return fit(subject, REPEATED), fit(subject, REPEATED)


def train_beside(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train with Lightning's ``ddp``, with the strategy, and with ``ddp`` again."""
    fit(Subject("ddp"), REPEATED)
    return fit(subject, REPEATED), fit(Subject("ddp"), REPEATED)


def train_with_pickled(subject: Subject) -> Outcome:
    """Train with a strategy object that has been through a pickle."""
    strategy = nnx_core.strategy(subject.name, namespace="lightning.pytorch", **subject.options)
    return fit(subject, REPEATED, strategy=pickle.loads(pickle.dumps(strategy)))


class _Stopper(Callback):
    """Wants to stop after the second step, on the last rank only."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        wish = is_last and trainer.global_step == 2
        if trainer.strategy.reduce_boolean_decision(wish, all=False):
            trainer.should_stop = True


def stop_early(subject: Subject) -> Outcome:
    """Train until one rank wants to stop."""
    return fit(subject, Task(steps=5), callbacks=[_Stopper()])


# What the ranks do to see what training leaves behind in the process.
#
# A probe describes one side of the process as counts by name; jobs take it before and after training.


TASK = Task(optimizer="adamw")
FURTHER_RUNS = 2
"""After the first; what they add is compared with its residue."""
DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux lists the open files of a process."""

Probe = Callable[[], Counter[str]]


@dataclass(frozen=True)
class Change:
    """What is there that was not there before, and what is gone, by name.

    Attributes:
        new: Counts of what was added.
        gone: Counts of what was taken away.
    """

    new: dict[str, int]
    gone: dict[str, int]

    @classmethod
    def between(cls, before: Counter[str], after: Counter[str]) -> Change:
        """Compare two descriptions."""
        return cls(dict(after - before), dict(before - after))


def changes(subject: Subject) -> dict[str, Change]:
    """What three runs change, by what is looked at; of what may grow once, only what grows with each run."""
    settings = {name: probe() for name, probe in SETTINGS.items()}
    fit(subject, TASK)
    counts = [_counts()]
    for _ in range(FURTHER_RUNS):
        fit(subject, TASK)
        counts.append(_counts())
    return {
        **{name: Change.between(settings[name], probe()) for name, probe in SETTINGS.items()},
        **{name: Change(_with_each_run([one[name] for one in counts]), {}) for name in GROWING},
    }


def _with_each_run(counts: Sequence[Counter[str]]) -> dict[str, int]:
    """What every run added to, and by how much all of them did.

    What came once does not count: torch's threads may hold the tensors of the latest call, and make things
    when first used.
    """
    added = [after - before for before, after in pairwise(counts)]
    return {name: counts[-1][name] - counts[0][name] for name in added[0] if all(name in a for a in added)}


def _counts() -> dict[str, Counter[str]]:
    gc.collect()
    return {name: probe() for name, probe in GROWING.items()}


def files_left(subject: Subject, directory: str) -> list[str]:
    """The files in the working directory and in that for temporary files, after a run that saves nothing."""
    work, temporary = Path(directory) / "work", Path(directory) / "tmp"
    for folder in (work, temporary):
        folder.mkdir(exist_ok=True)
    os.chdir(work)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    try:
        fit(subject, TASK)
    finally:
        tempfile.tempdir = None
    return sorted(path.relative_to(directory).as_posix() for path in Path(directory).glob("*/**/*"))


def survivors(subject: Subject) -> list[str]:
    """What is still alive after a run although nobody refers to it."""
    module = TASK.module()
    trainer = make_trainer(subject, TASK)
    trainer.fit(module)
    watched: dict[str, weakref.ref[Any]] = {
        "the module": weakref.ref(module),
        "a layer": weakref.ref(module.head),
        "a parameter": weakref.ref(module.head.weight),
        "the optimizer": weakref.ref(trainer.optimizers[0]),
    }
    del module, trainer
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


class _WithoutCollector(Callback):
    """Counts tensors after an early and the last step; Python's collector does not run in between."""

    def __init__(self, first: int, last: int) -> None:
        self._counted_at = (first, last)
        self.counts: list[Counter[str]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._counted_at[0]:
            gc.collect()
            gc.disable()
        if trainer.global_step in self._counted_at:
            self.counts.append(_tensors())


def left_by_steps(subject: Subject) -> dict[str, int]:
    """The tensors that steps leave behind until Python's collector comes, and how many."""
    task = replace(TASK, steps=7)
    counting = _WithoutCollector(3, task.steps)
    try:
        fit(subject, task, callbacks=[counting])
    finally:
        gc.enable()
    first, last = counting.counts
    return {name: grown for name, grown in (last - first).items() if grown >= task.steps - 3}


def _process_groups() -> Counter[str]:
    """By size and backend."""
    groups = process_groups() if dist.is_initialized() else []
    return Counter(f"{dist.get_backend(group)} group of {group.size()}" for group in groups)


def _threads() -> Counter[str]:
    return Counter(f"{type(thread).__name__} {thread.name}" for thread in threading.enumerate())


def _environment() -> Counter[str]:
    """Without those of the launcher: Lightning itself takes ``WORLD_SIZE`` away when a Trainer ends."""
    return Counter(f"{name}={value}" for name, value in os.environ.items() if name not in OF_LAUNCHERS)


def _signal_handlers() -> Counter[str]:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return Counter(f"{number.name} handled by {signal.getsignal(number)!r}" for number in watched)


def _torch_settings() -> Counter[str]:
    settings = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
    return Counter(f"{name} {value}" for name, value in settings.items())


def _descriptors() -> Counter[str]:
    """By kind: sockets and pipes have a number of their own."""
    kinds: Counter[str] = Counter()
    if not DESCRIPTORS.is_dir():
        return kinds
    for entry in DESCRIPTORS.iterdir():
        with suppress(OSError):  # the listing's own is closed by now
            kinds[str(entry.readlink()).partition(":")[0]] += 1
    return kinds


def _tensors() -> Counter[str]:
    """By shape and dtype, of all that Python can reach."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return Counter(f"tensor {tuple(one.shape)} {one.dtype}" for one in alive)


SETTINGS: dict[str, Probe] = {
    "threads": _threads,
    "environment": _environment,
    "signal handlers": _signal_handlers,
    "torch settings": _torch_settings,
}
"""What no run may change."""
GROWING: dict[str, Probe] = {
    "process groups": _process_groups,
    "descriptors": _descriptors,
    "tensors": _tensors,
}
"""What the first run may add to, such as the default process group, and further ones may not."""


def _expect_unchanged(bench: Bench, name: str) -> None:
    for rank, of_rank in enumerate(bench.run_once(changes)):
        change = of_rank[name]
        expect(
            not change.new and not change.gone,
            f"rank {rank}: {name} after training: new {change.new}, gone {change.gone}; expected no change.",
        )


def _expect_no_growth(bench: Bench, name: str) -> None:
    for rank, of_rank in enumerate(bench.run_once(changes)):
        new = of_rank[name].new
        expect(not new, f"rank {rank}: further runs added {new} {name}, expected none.")


@check()
def no_process_groups(bench: Bench) -> None:
    """Further runs in a process leave no further process groups."""
    _expect_no_growth(bench, "process groups")


@check()
def no_threads(bench: Bench) -> None:
    """No thread goes on when training has ended."""
    _expect_no_growth(bench, "threads")


@check("leaves_no_files")
def no_files(bench: Bench) -> None:
    """No file is left, neither in the working directory nor in that for temporary files."""
    for rank, files in enumerate(bench.run(files_left, str(bench.directory))):
        expect(not files, f"rank {rank} found {files} after a run that saves nothing.")


@check()
def no_environment_variables(bench: Bench) -> None:
    """Environment variables are as before."""
    _expect_unchanged(bench, "environment")


@check()
def no_torch_settings(bench: Bench) -> None:
    """Torch's defaults are as before: dtype, device, grad mode, determinism, precision, threads."""
    _expect_unchanged(bench, "torch settings")


@check()
def no_signal_handlers(bench: Bench) -> None:
    """Signals are handled as before."""
    _expect_unchanged(bench, "signal handlers")


@check()
def no_descriptors(bench: Bench) -> None:
    """Further runs in a process leave no further open files and sockets."""
    if not DESCRIPTORS.is_dir():
        bench.not_applicable(f"this system has no {DESCRIPTORS}")
    _expect_no_growth(bench, "descriptors")


@check()
def no_survivors(bench: Bench) -> None:
    """When the user drops a trained module, it and its parameters and optimizer are freed."""
    for rank, alive in enumerate(bench.run(survivors)):
        expect(not alive, f"rank {rank}: {', '.join(alive)} stayed alive after its Trainer was gone.")


@check()
def no_tensors(bench: Bench) -> None:
    """Further runs in a process leave no further tensors."""
    _expect_no_growth(bench, "tensors")


@check()
def no_tensors_of_steps(bench: Bench) -> None:
    """What a step made, such as gradients, is freed at once, without Python's collector."""
    for rank, grown in enumerate(bench.run(left_by_steps)):
        expect(not grown, f"rank {rank}: four steps left {grown} behind, expected none.")
