"""How a strategy is found and started: its plugin, the ways to launch processes, and Fabric."""

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
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnx_conformance.check import Bench, CheckFailed, all_checks, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses, expect_equal_weights, expect_same_run
from nnx_conformance.subject import Kind, Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task, process_rank_and_size
from nnx_conformance.training import OF_LAUNCHERS, Loop, Seen, fit, interrupted, train
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import StrategySpec, import_reference

# Starts `scripts/train.py` in the ways in which users start theirs, and reads what the processes report.
#
# A launch costs seconds, so its outcome is kept for the checks that look at different sides of it.


BY_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""``torchrun train.py``"""

_SCRIPTS = Path(__file__).parents[1] / "scripts"
"""Scripts as users write them, which are started by their paths and never imported."""
_done: dict[Launch, Launched] = {}


@dataclass(frozen=True)
class Launch:
    """How a script is started; equal launches are made once.

    Attributes:
        subject: The strategy.
        engine: Module that holds it.
        task: The training to run.
        launcher: The words between ``python`` and the script; without any the strategy starts the rest.
        devices: The devices of the Trainer.
        through: Names what builds the Trainer.
    """

    subject: Subject
    engine: str
    task: Task
    launcher: tuple[str, ...] = ()
    devices: int = 2
    through: str = "Trainer"

    def write(self, directory: Path) -> None:
        """Put down what the script reads."""
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
        """True if a script can use the strategy by its name, without imports of its own."""
        return not (self.subject.imports or self.subject.options or ":" in self.subject.strategy)


@dataclass(frozen=True)
class Launched:
    """How a script ended.

    Attributes:
        code: Exit code; None if it was killed at the deadline.
        output: The text that all its processes printed.
        seconds: The time from start to end.
        accounts: By rank, what `scripts/train.py` wrote.
    """

    code: int | None
    output: str
    seconds: float
    accounts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def expect_accounts(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """What these ranks reported.

        Raises:
            CheckFailed: The script did not get so far on just these ranks.
        """
        if sorted(self.accounts) == list(ranks) and self.code is not None:
            return [self.accounts[rank] for rank in ranks]
        end = f"ended with exit code {self.code}" if self.code is not None else "did not end"
        raise CheckFailed(
            f"the script {end} after {self.seconds:.0f} s; ranks {sorted(self.accounts)} reported, expected "
            f"{list(ranks)}. {self.last_words()}"
        )

    def last_words(self) -> str:
        """The end of what was printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return "It printed last: " + " | ".join(lines[-3:]) if lines else "It printed nothing."


def launch(bench: Bench, wanted: Launch) -> Launched:
    """Start the script and wait for its end, unless that was done before.

    Args:
        bench: Has the deadline.
        wanted: Describes how to start it.
    """
    if wanted not in _done:
        with tempfile.TemporaryDirectory(prefix="nnx-launch-") as top:
            _done[wanted] = _launch(wanted, Path(top), timeout=bench.remaining)
    return _done[wanted]


def _launch(wanted: Launch, directory: Path, *, timeout: float) -> Launched:
    wanted.write(directory)
    command = [sys.executable, *wanted.launcher, str(_SCRIPTS / "train.py"), str(directory)]
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
    """Run a command as if from a fresh shell; kill it and all it started at the deadline.

    Args:
        command: The command to run.
        directory: The directory to run it in.
        accelerator: On ``"cpu"`` the GPUs are hidden from it.
        timeout: Seconds.

    Returns:
        Its exit code (None where it had to be killed), all that was printed, and the seconds it took.
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
            os.killpg(process.pid, signal.SIGKILL)  # what the script left behind, too
        process.wait()
        output.seek(0)
        return code, output.read(), seconds


# The plugin that brings the strategy: what it says of itself, and what it costs to ask.


_OF_PLUGINS: tuple[Kind, ...] = ("backend", "strategy")


def _spec(bench: Bench) -> StrategySpec:
    """The declaration of an installed plugin; others are not asked for."""
    if bench.identity.owner == "this process":
        bench.not_applicable("it is not declared by an installed distribution")
    return StrategyRegistry.get(bench.subject.name)


@check(kinds=_OF_PLUGINS)
def light_plugin(bench: Bench) -> None:
    """Finding its strategies, and ``nnx list`` and ``nnx show``, import no torch, Lightning or engine."""
    engine = _spec(bench).reference.partition(":")[0]
    code, output, _ = run_script(
        [sys.executable, str(_SCRIPTS / "look.py"), bench.subject.name, engine],
        directory=bench.directory,
        accelerator=bench.subject.accelerator,
        timeout=bench.remaining,
    )
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise CheckFailed(f"`nnx list` and `nnx show` ended with {code} and printed {output!r}.") from None
    codes, imported = found["codes"], found["imported"]
    said = " | ".join(output.splitlines()[:-1])
    expect(codes == [0, 0], f"`nnx list` and `nnx show` ended with {codes}, expected zeros. {said}")
    expect(not imported, f"finding strategies and listing them imported {imported}, which they must not.")


@check(kinds=_OF_PLUGINS)
def described(bench: Bench) -> None:
    """The plugin says in a line each what the strategy is and when to use it."""
    spec = _spec(bench)
    for name, text in (("description", spec.description), ("use_when", spec.use_when)):
        expect(bool(text.strip()), f"{name} is empty.")
        expect("\n" not in text, f"{name} has several lines: {text!r}.")
    expect(
        not spec.docs_url or bool(re.fullmatch(r"https?://\S+|[\w./-]+\.(md|rst|html)", spec.docs_url)),
        f"docs_url={spec.docs_url!r} is neither the address of a page nor its path in the repository.",
    )


@check(kinds=_OF_PLUGINS)
def documented_options(bench: Bench) -> None:
    """Every option is documented: what changes when one turns it."""
    spec = _spec(bench)
    if not spec.options:
        bench.not_applicable("it declares no options")
    options = fields(import_reference(spec.options, what=bench.subject.strategy))
    bare = [option.name for option in options if not str(option.metadata.get("help", "")).strip()]
    expect(
        not bare, f"options {bare} have no help; declare them with nnx_core.options.option(..., help=...)."
    )


@check(kinds=_OF_PLUGINS)
def declared_options(bench: Bench) -> None:
    """The options that the plugin declares for ``nnx show`` are those that the engine takes."""
    spec = _spec(bench)
    taken: Any = getattr(spec.resolve(), "Options", None)
    if taken is None:
        bench.not_applicable("its class has no Options")
    names = [option.name for option in fields(taken)]
    shown = fields(import_reference(spec.options, what=bench.subject.strategy)) if spec.options else ()
    told = [option.name for option in shown]
    expect(told == names, f"the spec's options {spec.options!r} are {told}, the engine takes {names}.")


@check(kinds=_OF_PLUGINS)
def declared_refusals(bench: Bench) -> None:
    """The habits that the plugin declares as refused are habits that the suite knows."""
    known = {one.name for one in all_checks() if one.refusable}
    unknown = sorted(set(_spec(bench).capabilities.refuses) - known)
    expect(not unknown, f"refuses={unknown}, which `nnx conformance --list` does not have as habits.")


@check(kinds=_OF_PLUGINS)
def portable_spec(bench: Bench) -> None:
    """The declaration is data: it can be pickled, and shown as JSON."""
    spec = _spec(bench)
    try:
        copy = pickle.loads(pickle.dumps(spec))
        json.dumps(spec.as_dict())
    except Exception as error:
        raise CheckFailed(f"the spec is not plain data: {type(error).__name__}: {error}.") from error
    expect(copy == spec, f"the spec comes back from a pickle as {copy}, expected {spec}.")


# How processes start: by Lightning itself, by torchrun, by multiprocessing, or not at all.


TASK = Task()
DEADLINE = 150.0
"""Seconds for a script, which takes five on an idle machine: the most that the checks ask of busy ones."""
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
    """``python train.py`` starts all processes by itself and trains as one process does."""
    launched = launch(bench, _plan(bench))
    _expect_same_training(bench, launched, ranks=2, how="launched by Lightning")


@check(deadline=DEADLINE, of_adapter=True)
def script_ends_cleanly(bench: Bench) -> None:
    """A script that has trained ends by itself, with exit code 0 and without complaints."""
    launched = launch(bench, _plan(bench))
    expect(
        launched.code == 0,
        f"exit code {launched.code} (None: killed after {launched.seconds:.0f} s), expected 0. "
        f"{launched.last_words()}",
    )
    found = [line.strip() for line in launched.output.splitlines() if _COMPLAINTS.search(line)]
    expect(not found, f"it printed {found[:3]}, expected no complaint.")


@check(deadline=DEADLINE, of_adapter=True)
def known_without_import(bench: Bench) -> None:
    """Both copies of Lightning know the name without ``import nnx``, and import its engine only to use it."""
    plan = _plan(bench)
    if not plan.is_installed:
        bench.not_applicable("it is not used by a name that a distribution registers")
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
        expect(not found["nnx was imported"], "nnx_conformance was imported before the script did so.")
        expect(
            not found["engine was imported"] or bench.subject.is_lightning,
            f"{plan.engine} was imported together with Lightning, expected when the strategy is built.",
        )


@check()
def one_device(bench: Bench) -> None:
    """On one device it trains as one process does."""
    alone = bench.train_alone(TASK)
    expect_same_run(bench.train(TASK, world_size=1), alone, tolerance=TOLERANCE[TASK.dtype])


@check(kinds=("backend",))
def told_how_it_trains(bench: Bench) -> None:
    """A run begins with one line on rank 0: ranks, device, and the samples of a step of the optimizer."""
    task = replace(TASK, accumulate=2, steps=2)
    first, *others = bench.run(lines_about_the_batch, task)
    wanted = f"{bench.subject.name}: 2 ranks on 1 node, .*; global batch {2 * GLOBAL_BATCH} "
    expect(len(first) == 1 and bool(re.match(wanted, first[0])), f"rank 0 said {first}, expected {wanted!r}.")
    expect(not any(others), f"ranks beside the first said {others}.")


def lines_about_the_batch(subject: Subject, task: Task) -> list[str]:
    """What nnx logs about the global batch while a task is trained."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nnx")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fit(subject, task)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [line for line in said if "global batch" in line]


@check(full=True, deadline=DEADLINE)
def one_device_without_launcher(bench: Bench) -> None:
    """``python train.py`` on one device trains in that very process."""
    launched = launch(bench, replace(_plan(bench), devices=1))
    _expect_same_training(bench, launched, ranks=1, how="launched on one device")


@check(full=True, deadline=DEADLINE)
def launched_by_torchrun(bench: Bench) -> None:
    """``torchrun train.py`` trains as one process does."""
    launched = launch(bench, replace(_plan(bench), launcher=BY_TORCHRUN))
    _expect_same_training(bench, launched, ranks=2, how="launched by torchrun")


@check(full=True, deadline=DEADLINE, kinds=("backend", "lightning"))
def launched_by_spawn(bench: Bench) -> None:
    """With ``start_method="spawn"`` the weights of the spawned processes come back to the script."""
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
    """LightningCLI takes the name as ``--trainer.strategy NAME``."""
    plan = _plan(bench)
    if not plan.is_installed:
        bench.not_applicable("it is not used by a name that a distribution registers")
    if find_spec("jsonargparse") is None:
        bench.not_applicable("LightningCLI needs jsonargparse, which is not installed")
    launched = launch(bench, replace(plan, through="LightningCLI"))
    _expect_same_training(bench, launched, ranks=2, how="launched by LightningCLI")


@check(full=True, deadline=DEADLINE)
def lone_failure_ends_the_script(bench: Bench) -> None:
    """A script in which one rank fails ends within seconds, not with exit code 0, and shows the cause."""
    plan = replace(_plan(bench), task=replace(TASK, model=FailsOnLastRank))
    launched = launch(bench, plan)
    expect(
        launched.code is not None and launched.code != 0,
        f"exit code {launched.code} after {launched.seconds:.0f} s (None: it had to be killed), expected "
        f"another one than 0. {launched.last_words()}",
    )
    expect(
        FailsOnLastRank.MESSAGE in launched.output,
        f"the cause {FailsOnLastRank.MESSAGE!r} was not printed. {launched.last_words()}",
    )


class FailsOnLastRank(Plain):
    """Its second step fails where the rank is the highest."""

    MESSAGE = "planted in the script's second step"

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Fail, or do as usual."""
        rank, size = process_rank_and_size()
        if index == 1 and rank == size - 1:
            raise RuntimeError(self.MESSAGE)
        return super().training_step(batch, index)


# The same strategy in Fabric: a training loop that the user writes.


_CLIP = 0.3
"""Below every norm of the gradients of these loops."""


def _compare(ranks: Sequence[Seen], alone: Seen, *, tolerance: float = TOLERANCE["float32"]) -> None:
    for rank, seen in enumerate(ranks):
        where = f"Fabric, rank {rank} of {len(ranks)}"
        expect_equal_losses(seen.losses, alone.losses, tolerance=tolerance, where=where)


@check("fabric")
def fabric_loop(bench: Bench) -> None:
    """A training loop in Fabric gives the losses of one process."""
    loop = Loop()
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric", "gradient_accumulation")
def fabric_accumulation(bench: Bench) -> None:
    """Fabric's ``no_backward_sync`` accumulates gradients that the next backward reduces."""
    loop = Loop(accumulate=2, steps=3)
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric", "clip_by_norm")
def fabric_clipping_by_norm(bench: Bench) -> None:
    """Fabric's ``clip_gradients(max_norm=)`` clips by the norm over all ranks, and returns it."""
    loop = Loop(clip_norm=_CLIP)
    ranks, alone = bench.run(train, loop), bench.alone(train, loop)
    _compare(ranks, alone)
    for rank, seen in enumerate(ranks):
        for norm, wanted in zip(seen.norms, alone.norms, strict=True):
            expect(
                abs(norm - wanted) <= 1e-4 * wanted,
                f"rank {rank}: clip_gradients returned the norm {norm:.6g}, one process has {wanted:.6g}.",
            )


@check("fabric", "clip_by_value")
def fabric_clipping_by_value(bench: Bench) -> None:
    """Fabric's ``clip_gradients(clip_val=)`` clips every element of the reduced gradients."""
    loop = Loop(clip_value=0.02)
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric")
def fabric_checkpoint(bench: Bench) -> None:
    """What Fabric saves, new objects load, and go on as if there had been no interruption."""
    loop = Loop()
    path = str(bench.directory / "fabric.ckpt")
    _compare(bench.run(interrupted, loop, path), bench.alone(train, loop))


@check("fabric", "precisions:bf16-mixed")
def fabric_precision(bench: Bench) -> None:
    """``Fabric(precision="bf16-mixed")`` computes in bfloat16, with the losses of one process."""
    loop = Loop(precision="bf16-mixed")
    ranks, alone = bench.run(train, loop), bench.alone(train, loop)
    for rank, seen in enumerate(ranks):
        expect(
            seen.output_dtype == torch.bfloat16,
            f"rank {rank}: activations are {seen.output_dtype}, expected torch.bfloat16.",
        )
    _compare(ranks, alone, tolerance=0.02)
