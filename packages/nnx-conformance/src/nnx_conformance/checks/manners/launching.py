"""How processes start: by Lightning itself, by torchrun, by multiprocessing, or not at all."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from importlib.util import find_spec

from torch import Tensor

from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_equal_weights, expect_same_run
from nnx_conformance.launching import BY_TORCHRUN, Launch, Launched, launch
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task
from nnx_conformance.training import fit

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
        if index == 1 and self.trainer.global_rank == self.trainer.world_size - 1:
            raise RuntimeError(self.MESSAGE)
        return super().training_step(batch, index)
