"""Scripts that use the strategy start, train and end under each launcher.

A launch takes seconds, so several checks share the outcome of one.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_weights, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task, process_rank_and_size
from nnx_conformance.training import OF_LAUNCHERS, fit

BY_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""The words for ``torchrun train.py``."""

SCRIPTS = Path(__file__).parents[2] / "scripts"
"""Scripts like those of users, which a new Python runs by path."""
_done: dict[Launch, Launched] = {}


@dataclass(frozen=True)
class Launch:
    """Describes how to start a script; equal launches run once.

    Attributes:
        subject: The strategy.
        engine: Module of the strategy.
        task: The training to run.
        launcher: The words between ``python`` and the script; if empty, the strategy starts the other ranks.
        devices: The devices of the Trainer.
        through: Name of the class that builds the Trainer.

    """

    subject: Subject
    engine: str
    task: Task
    launcher: tuple[str, ...] = ()
    devices: int = 2
    through: str = "Trainer"

    def write(self, directory: Path) -> None:
        """Write the files that the script reads."""
        job = {
            "strategy": self.subject.name,
            "engine": self.engine,
            "prepare": not self.is_installed,
            "devices": self.devices,
            "through": self.through,
        }
        (directory / "job.json").write_text(json.dumps(job))
        (directory / "job.pickle").write_bytes(pickle.dumps((self.subject, self.task)))

    @property
    def is_installed(self) -> bool:
        """True if a script can use the strategy by name, without imports of its own."""
        return not (self.subject.imports or self.subject.options or ":" in self.subject.strategy)


@dataclass(frozen=True)
class Launched:
    """The end of a script.

    Attributes:
        code: Exit code; None if the script was killed at the deadline.
        output: The output of all its processes.
        seconds: The time from start to end.
        accounts: By rank, the account that `scripts/train.py` wrote.

    """

    code: int | None
    output: str
    seconds: float
    accounts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def expect_accounts(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return the accounts of these ranks.

        Raises:
            CheckFailed: Other ranks reported, or the script was killed.

        """
        if sorted(self.accounts) == list(ranks) and self.code is not None:
            return [self.accounts[rank] for rank in ranks]
        end = f"ended with exit code {self.code}" if self.code is not None else "did not end"
        raise CheckFailed(
            f"the script {end} after {self.seconds:.0f} s; ranks {sorted(self.accounts)} reported, expected "
            f"{list(ranks)}. {self.last_words()}"
        )

    def last_words(self) -> str:
        """Return the last lines of the output."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return "It printed last: " + " | ".join(lines[-3:]) if lines else "It printed nothing."


def launch(bench: Bench, wanted: Launch) -> Launched:
    """Start the script and wait for its end, unless an equal launch has run before.

    Args:
        bench: Has the deadline.
        wanted: Describes how to start the script.

    """
    bench.require_ranks(wanted.devices)
    if wanted not in _done:
        with tempfile.TemporaryDirectory(prefix="nnx-launch-") as top:
            _done[wanted] = _launch(wanted, Path(top), timeout=bench.remaining)
    return _done[wanted]


def _launch(wanted: Launch, directory: Path, *, timeout: float) -> Launched:
    wanted.write(directory)
    command = [sys.executable, *wanted.launcher, str(SCRIPTS / "train.py"), str(directory)]
    code, output, seconds = run_script(
        command, directory=directory, accelerator=wanted.subject.accelerator, timeout=timeout
    )
    accounts = {
        int(path.stem.partition("-")[2]): pickle.loads(path.read_bytes())
        for path in directory.glob("account-*.pickle")
    }
    return Launched(code, output, seconds, accounts)


def run_script(
    command: Sequence[str], *, directory: Path, accelerator: str, timeout: float
) -> tuple[int | None, str, float]:
    """Run a command as from a fresh shell; kill it and its children at the deadline.

    Args:
        command: The command to run.
        directory: The directory to run it in.
        accelerator: With ``"cpu"`` the command sees no GPUs.
        timeout: Seconds.

    Returns:
        The exit code (None if killed), the output, and the seconds from start to end.

    """
    environment = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment["OMP_NUM_THREADS"] = "1"
    if accelerator == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.monotonic()
    with (directory / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
        seconds = time.monotonic() - started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that outlived the script
        process.wait()
        output.seek(0)
        return code, output.read(), seconds


TASK = Task()
DEADLINE = 150.0
"""Seconds for a script. An idle machine needs five; busy machines get much more."""
_COMPLAINTS = re.compile(
    r"Traceback|Exception ignored|Fatal Python error|destroy_process_group|leaked \w+ objects|"
    r"terminate called|core dumped"
)


def _plan(bench: Bench) -> Launch:
    return Launch(bench.subject, bench.identity.target.partition(":")[0], TASK)


def _expect_same_training(bench: Bench, launched: Launched, *, ranks: int, how: str) -> None:
    accounts = launched.expect_accounts(range(ranks))
    for rank, account in enumerate(accounts):
        expect(
            account["world size"] == ranks,
            f"{how}: rank {rank} trained as one of {account['world size']}, expected {ranks}.",
        )
    outcomes = [account["outcome"] for account in accounts]
    expect_same_run(outcomes, bench.train_alone(TASK), tolerance=TOLERANCE[TASK.dtype], what=how)


@check(deadline=DEADLINE, of_adapter=True)
def launched_by_lightning(bench: Bench) -> None:
    """``python train.py`` starts all processes and trains as in one process."""
    launched = launch(bench, _plan(bench))
    _expect_same_training(bench, launched, ranks=2, how="launched by Lightning")


@check(deadline=DEADLINE, of_adapter=True)
def script_ends_cleanly(bench: Bench) -> None:
    """A script ends by itself after training, with exit code 0 and without complaints."""
    launched = launch(bench, _plan(bench))
    expect(
        launched.code == 0,
        f"exit code {launched.code} (None: killed after {launched.seconds:.0f} s), expected 0. "
        f"{launched.last_words()}",
    )
    found = [line.strip() for line in launched.output.splitlines() if _COMPLAINTS.search(line)]
    expect(not found, f"it printed {found[:3]}, expected no complaint.")


@check(deadline=DEADLINE, of_adapter=True)
def name_known_without_import(bench: Bench) -> None:
    """Both Lightning packages know the name without ``import nnx``, and import the engine only to use it."""
    plan = _plan(bench)
    if not plan.is_installed:
        bench.not_applicable("no installed distribution registers its name")
    capabilities = bench.identity.capabilities
    wanted = [
        *(["lightning.pytorch", "pytorch_lightning"] if capabilities.trainer else []),
        *(["lightning.fabric", "lightning_fabric"] if capabilities.fabric else []),
    ]
    launched = launch(bench, plan)
    for account in launched.expect_accounts(range(2)):
        found = account["found"]
        expect(
            sorted(found["known in"]) == sorted(wanted),
            f"{bench.subject.strategy!r} is known in {found['known in']}, expected {wanted}.",
        )
        expect(
            not found["nnx was imported"],
            "Lightning imported nnx_conformance, expected the script to be the first.",
        )
        expect(
            not found["engine was imported"] or bench.subject.is_lightning,
            f"Lightning imported {plan.engine}, expected the import when the strategy is built.",
        )


@check()
def one_device(bench: Bench) -> None:
    """The strategy on one device trains as in one process."""
    alone = bench.train_alone(TASK)
    expect_same_run(bench.train(TASK, world_size=1), alone, tolerance=TOLERANCE[TASK.dtype])


@check(kinds=("backend",))
def startup_log_line(bench: Bench) -> None:
    """Rank 0 logs one line at the start: ranks, device, and samples per optimizer step."""
    task = replace(TASK, accumulate=2, steps=2)
    first, *others = bench.run(lines_about_the_batch, task)
    wanted = f"{bench.subject.name}: 2 ranks on 1 node, .*; global batch {2 * GLOBAL_BATCH} "
    expect(
        len(first) == 1 and bool(re.match(wanted, first[0])), f"rank 0 logged {first}, expected {wanted!r}."
    )
    expect(not any(others), f"other ranks than 0 logged {others}, expected nothing.")


def lines_about_the_batch(subject: Subject, task: Task) -> list[str]:
    """Return the lines that nnx logs about the global batch during training."""
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nnx")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fit(subject, task)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [line for line in logged if "global batch" in line]


@check(full=True, deadline=DEADLINE)
def one_device_without_launcher(bench: Bench) -> None:
    """``python train.py`` on one device trains in that very process."""
    launched = launch(bench, replace(_plan(bench), devices=1))
    _expect_same_training(bench, launched, ranks=1, how="launched on one device")


@check(full=True, deadline=DEADLINE)
def launched_by_torchrun(bench: Bench) -> None:
    """``torchrun train.py`` trains as in one process."""
    launched = launch(bench, replace(_plan(bench), launcher=BY_TORCHRUN))
    _expect_same_training(bench, launched, ranks=2, how="launched by torchrun")


@check(full=True, deadline=DEADLINE, kinds=("backend", "lightning"))
def launched_by_spawn(bench: Bench) -> None:
    """With ``start_method="spawn"`` the script gets the weights of the spawned processes."""
    plan = _plan(bench)
    options = {**bench.subject.options, "start_method": "spawn"}
    launched = launch(bench, replace(plan, subject=replace(bench.subject, options=options)))
    account = launched.expect_accounts([0])[0]
    alone = bench.train_alone(TASK)
    expect_equal_weights(
        account["outcome"].weights,
        alone.weights,
        tolerance=TOLERANCE[TASK.dtype],
        where="the script that spawned two ranks",
    )


@check("trainer", full=True, deadline=DEADLINE)
def lightning_cli(bench: Bench) -> None:
    """LightningCLI accepts the name as ``--trainer.strategy NAME``."""
    plan = _plan(bench)
    if not plan.is_installed:
        bench.not_applicable("no installed distribution registers its name")
    if find_spec("jsonargparse") is None:
        bench.not_applicable("LightningCLI needs jsonargparse, which is not installed")
    launched = launch(bench, replace(plan, through="LightningCLI"))
    _expect_same_training(bench, launched, ranks=2, how="launched by LightningCLI")


@check(full=True, deadline=DEADLINE)
def one_failed_rank_ends_script(bench: Bench) -> None:
    """A script with one failed rank ends within seconds, with a nonzero exit code, and prints the cause."""
    plan = replace(_plan(bench), task=replace(TASK, model=FailsOnLastRank))
    launched = launch(bench, plan)
    expect(
        launched.code is not None and launched.code != 0,
        f"exit code {launched.code} after {launched.seconds:.0f} s (None: killed), expected "
        f"a nonzero one. {launched.last_words()}",
    )
    expect(
        FailsOnLastRank.MESSAGE in launched.output,
        f"the script did not print the cause {FailsOnLastRank.MESSAGE!r}. {launched.last_words()}",
    )


class FailsOnLastRank(Plain):
    """Fails in its second step on the last rank."""

    MESSAGE = "planted in the script's second step"

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        rank, size = process_rank_and_size()
        if index == 1 and rank == size - 1:
            raise RuntimeError(self.MESSAGE)
        return super().training_step(batch, index)
