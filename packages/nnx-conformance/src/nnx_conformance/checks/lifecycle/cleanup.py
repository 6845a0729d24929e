"""A process is unchanged after training: nothing stays allocated, open or altered."""

from __future__ import annotations

import gc
import os
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

from nnx_base._torch_compat import process_groups
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import OF_LAUNCHERS, fit, make_trainer

TASK = Task(optimizer="adamw")
FURTHER_RUNS = 2
"""Runs after the first one, which is compared with them."""
DESCRIPTORS = Path("/proc/self/fd")
"""The directory in which Linux lists the open files of a process."""

Probe = Callable[[], Counter[str]]


@dataclass(frozen=True)
class Change:
    """The difference between two descriptions of a process, by name.

    Attributes:
        new: Counts of additions.
        gone: Counts of removals.

    """

    new: dict[str, int]
    gone: dict[str, int]

    @classmethod
    def between(cls, before: Counter[str], after: Counter[str]) -> Change:
        """Compare two descriptions."""
        return cls(dict(after - before), dict(before - after))


def changes(subject: Subject) -> dict[str, Change]:
    """Return the changes after three runs, by probe; for `GROWING`, the growth in every run."""
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
    """Return the names that every run added to, with their total growth.

    Growth in one run does not count: torch's threads may hold the tensors of the latest call, and create
    objects on first use.

    """
    added = [after - before for before, after in pairwise(counts)]
    return {name: counts[-1][name] - counts[0][name] for name in added[0] if all(name in a for a in added)}


def _counts() -> dict[str, Counter[str]]:
    gc.collect()
    return {name: probe() for name, probe in GROWING.items()}


def files_left(subject: Subject, directory: str) -> list[str]:
    """Return the files in the working and temporary directories after a run that saves nothing."""
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
    """Return the objects that are still alive after a run, although user code holds no reference."""
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
    """Counts tensors after an early and the last step, with garbage collection disabled in between."""

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
    """Return the tensors that each step leaves for the garbage collector, with their number."""
    task = replace(TASK, steps=7)
    counting = _WithoutCollector(3, task.steps)
    try:
        fit(subject, task, callbacks=[counting])
    finally:
        gc.enable()
    first, last = counting.counts
    return {name: grown for name, grown in (last - first).items() if grown >= task.steps - 3}


def _process_groups() -> Counter[str]:
    """Count the groups by size and backend."""
    groups = process_groups() if dist.is_initialized() else []
    return Counter(f"{dist.get_backend(group)} group of {group.size()}" for group in groups)


def _threads() -> Counter[str]:
    return Counter(f"{type(thread).__name__} {thread.name}" for thread in threading.enumerate())


def _environment() -> Counter[str]:
    """Return the environment without launcher variables, some of which Lightning itself removes."""
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
    """Count by kind, because each socket and pipe has its own number."""
    kinds: Counter[str] = Counter()
    if not DESCRIPTORS.is_dir():
        return kinds
    for entry in DESCRIPTORS.iterdir():
        with suppress(OSError):  # the listing's own descriptor is closed by now
            kinds[str(entry.readlink()).partition(":")[0]] += 1
    return kinds


def _tensors() -> Counter[str]:
    """Count all tensors that Python can reach, by shape and dtype."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return Counter(f"tensor {tuple(one.shape)} {one.dtype}" for one in alive)


SETTINGS: dict[str, Probe] = {
    "threads": _threads,
    "environment": _environment,
    "signal handlers": _signal_handlers,
    "torch settings": _torch_settings,
}
"""Probes that no run may change."""
GROWING: dict[str, Probe] = {
    "process groups": _process_groups,
    "descriptors": _descriptors,
    "tensors": _tensors,
}
"""Probes that the first run may add to (a default process group, say), but later runs may not."""


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
        expect(not new, f"rank {rank}: repeated runs added {new} {name}, expected none.")


@check()
def no_leftover_process_groups(bench: Bench) -> None:
    """Repeated runs in a process leave no additional process groups."""
    _expect_no_growth(bench, "process groups")


@check()
def no_leftover_threads(bench: Bench) -> None:
    """No thread of a run outlives it."""
    _expect_no_growth(bench, "threads")


@check("leaves_no_files")
def no_leftover_files(bench: Bench) -> None:
    """A run leaves no file in the working directory or the temporary directory."""
    for rank, files in enumerate(bench.run(files_left, str(bench.directory))):
        expect(not files, f"rank {rank} found {files} after a run that saves nothing.")


@check()
def environment_variables_restored(bench: Bench) -> None:
    """Environment variables are the same before and after training."""
    _expect_unchanged(bench, "environment")


@check()
def torch_settings_restored(bench: Bench) -> None:
    """Torch's defaults are unchanged: dtype, device, grad mode, determinism, precision, threads."""
    _expect_unchanged(bench, "torch settings")


@check()
def signal_handlers_restored(bench: Bench) -> None:
    """Signal handlers are the same before and after training."""
    _expect_unchanged(bench, "signal handlers")


@check()
def no_leftover_file_descriptors(bench: Bench) -> None:
    """Repeated runs in a process leave no additional open files and sockets."""
    if not DESCRIPTORS.is_dir():
        bench.not_applicable(f"this system has no {DESCRIPTORS}")
    _expect_no_growth(bench, "descriptors")


@check()
def module_freed(bench: Bench) -> None:
    """A trained module, its parameters and its optimizer are freed when the user drops them."""
    for rank, alive in enumerate(bench.run(survivors)):
        expect(not alive, f"rank {rank}: {', '.join(alive)} outlived the Trainer.")


@check()
def no_leftover_tensors(bench: Bench) -> None:
    """Repeated runs in a process leave no additional tensors."""
    _expect_no_growth(bench, "tensors")


@check()
def step_tensors_freed(bench: Bench) -> None:
    """Temporary tensors of a step, such as gradients, are freed at once, without garbage collection."""
    for rank, grown in enumerate(bench.run(left_by_steps)):
        expect(not grown, f"rank {rank}: four steps left {grown} behind, expected none.")
