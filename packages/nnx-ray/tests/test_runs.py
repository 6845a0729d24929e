"""Runs of a Trainer on a cluster of three raylets: ranks, numbers, returned results, and lost actors."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import nnx
from jobs.ray_jobs import Account, Logging, ranks_of, steps_of, train_with_fabric
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer
from nnx_core.errors import LaunchError

STRATEGIES = (
    *("ddp", "fsdp_auto", "fsdp_hybrid", "nnscaler_deduped", "nnscaler_zero", "colossalai"),
    *("nnx_deepspeed_2", "fairscale_fsdp"),
)
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}


def task_of(steps: int, **more: Any) -> Task:
    return Task(steps=steps, clip=0.5, optimizer="adamw", model=Logging, **more)


def trainer_of(
    folder: Path,
    steps: int,
    *,
    strategy: str = "fsdp_auto",
    nodes: int = 2,
    devices: int = 1,
    **settings: Any,
) -> Any:
    """Return a Trainer whose processes are Ray's actors, and that saves each step."""
    account = settings.pop("account", {})
    options = {"launcher": "ray", "placement": "strict_spread", **settings.pop("options", {})}
    saving = ModelCheckpoint(
        folder / "saved", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    return make_trainer(
        Subject(strategy, options=options),
        task_of(steps),
        devices=devices,
        num_nodes=nodes,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[saving, Account(folder, **account)],
        plugins=[nnx.CheckpointIO()] if strategy == "ddp" else [],
        **settings,
    )


def losses_alone(steps: int) -> list[float]:
    """The losses of one process without a launcher."""
    module = task_of(steps).module()
    make_trainer(Subject("fsdp_auto"), task_of(steps), devices=1).fit(module)
    return module.losses


def losses_by_step(folder: Path) -> list[float]:
    """Return the loss of each step; for a repeated step, the last one."""
    found = {line["step"]: line["loss"] for line in steps_of(folder)}
    return [found[step] for step in sorted(found)]


@pytest.mark.full
def test_a_killed_actor_costs_the_steps_since_the_last_checkpoint(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nnx")
    logging.getLogger("nnx").propagate = True
    trainer = trainer_of(tmp_path, 5, account={"dies": (1, 3)})
    trainer.fit(task_of(5).module())
    assert losses_by_step(tmp_path) == pytest.approx(losses_alone(5), rel=1e-4)
    ranks = ranks_of(tmp_path)
    assert [(who["rank"], who["world"], who["node"], who["local"]) for who in ranks] == [
        (0, 2, 0, 0),
        (1, 2, 1, 0),
    ]
    assert len({who["raylet"] for who in ranks}) == 2
    assert [who["share"]["rank"] for who in ranks] == [0, 1]
    messages = "\n".join(record.getMessage() for record in caplog.records)
    assert "ray: rank 1 on" in messages and "is lost" in messages
    resumed = [line for line in messages.splitlines() if line.startswith("ray: resuming after step")]
    assert len(resumed) == 1 and resumed[0].split()[4] in ("2,", "3,") and str(tmp_path) in resumed[0]
    assert trainer.global_step == 5
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(losses_alone(5)[-1], rel=1e-4)
    assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
    assert trainer.checkpoint_callback.best_model_path.endswith("step=5.ckpt")


@pytest.mark.full
def test_a_killed_actor_costs_the_steps_since_the_last_copy_in_memory(cluster: Any, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    copies = {"memory_checkpoint": 2, "memory_directory": str(memory)}
    trainer = make_trainer(
        Subject("fsdp_auto", options={"launcher": "ray", "placement": "strict_spread", **copies}),
        task_of(7),
        devices=1,
        num_nodes=2,
        default_root_dir=tmp_path,
        callbacks=[Account(tmp_path, dies=(1, 5))],
    )
    trainer.fit(task_of(7).module())
    assert losses_by_step(tmp_path) == pytest.approx(losses_alone(7), rel=1e-4)
    steps = [line["step"] for line in steps_of(tmp_path)]
    again = next(after for before, after in pairwise(steps) if after <= before)
    assert again in (3, 5)  # from the copy of step 4, or of step 2 where the kill came before its commit
    assert not list(memory.iterdir())


@pytest.mark.full
def test_the_exception_of_the_rank_that_failed_first_comes_back_with_its_traceback(
    cluster: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, 5, account={"raises": (1, 2)})
    with pytest.raises(KeyError, match="rank 1 at step 2") as caught:
        trainer.fit(task_of(5).module())
    told = str(caught.value.__cause__)
    assert "rank 1 on " in told and "in on_train_batch_end" in told
    assert len(steps_of(tmp_path)) == 2  # it was not tried again


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_as_one_process_does(
    strategy: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"runtime_env": {"env_vars": DEEPSPEED}} if "deepspeed" in strategy else {}
    trainer = trainer_of(tmp_path, 4, strategy=strategy, devices=2, options=options)
    module = task_of(4).module()
    trainer.fit(module)
    assert losses_by_step(tmp_path) == pytest.approx(losses_alone(4), rel=1e-4)
    ranks = ranks_of(tmp_path)
    assert [(who["node"], who["local"]) for who in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    raylets = [who["raylet"] for who in ranks]
    assert raylets[0] == raylets[1] != raylets[2] == raylets[3]
    known = nnx.StrategyRegistry
    sharded = strategy in known and known.get(strategy).capabilities.shards_parameters
    assert next(module.parameters()).is_meta == sharded


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_raylet_costs_no_more_and_another_takes_its_place(cluster: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 40, account={"seconds": 0.2})
    began: list[float] = []

    def kill_the_raylet_of_rank_1() -> None:
        wait_for(lambda: (tmp_path / "steps.jsonl").exists() and len(steps_of(tmp_path)) > 3)
        wanted = ranks_of(tmp_path)[1]["raylet"]
        node = next(node for node in cluster.worker_nodes if node.node_id == wanted)
        cluster.remove_node(node, allow_graceful=False)
        began.append(time.time())

    with in_the_background(kill_the_raylet_of_rank_1):
        trainer.fit(task_of(40).module())
    cluster.add_node(num_cpus=2)
    assert losses_by_step(tmp_path) == pytest.approx(losses_alone(40), rel=1e-3)
    again = next(line["at"] for line in steps_of(tmp_path) if line["at"] > began[0] + 2)
    print(f"training again {again - began[0]:.1f} s after the raylet was killed")
    assert again - began[0] < 60


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_kills_of_random_actors_lose_no_run(cluster: Any, tmp_path: Path) -> None:
    kills, steps = 20, 400
    trainer = trainer_of(tmp_path, steps, account={"seconds": 0.1}, options={"max_failures": kills})
    draw, killed, done = random.Random(23), [], threading.Event()

    def kill_at_random() -> None:
        for _ in range(kills):
            seen = len(steps_of(tmp_path)) if (tmp_path / "steps.jsonl").exists() else 0
            more = draw.randrange(1, 8)
            wait_for(lambda seen=seen, more=more: count(tmp_path) >= seen + more or done.is_set())
            time.sleep(draw.random() * 0.3)
            if done.is_set():
                return
            pid = int((tmp_path / f"rank-{draw.randrange(2)}.pid").read_text())
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)

    with in_the_background(kill_at_random):
        trainer.fit(task_of(steps).module())
        done.set()
    assert len(killed) == kills
    assert losses_by_step(tmp_path) == pytest.approx(losses_alone(steps), rel=1e-3)
    at = [line["at"] for line in steps_of(tmp_path)]
    gaps = [next((time for time in at if time > kill + 2), math.inf) - kill for kill in killed]
    print(f"running again after {max(gaps):.1f} s at most, {sum(gaps) / kills:.1f} s in the mean")
    assert max(gaps) < 30


@pytest.mark.full
def test_a_run_that_is_lost_too_often_ends_with_one_error(cluster: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 5, account={"dies": (0, 2)}, options={"max_failures": 0})
    with pytest.raises(LaunchError, match=r"rank 0 on .* is lost: .*max_failures=0"):
        trainer.fit(task_of(5).module())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp_auto", "ddp"])
def test_fabric_launches_a_function_in_actors_and_gets_back_what_rank_0_returns(
    strategy: str, cluster: Any
) -> None:
    from lightning.fabric import Fabric

    built = nnx.strategy(strategy, launcher="ray", namespace="lightning.fabric")
    fabric = Fabric(strategy=built, accelerator="cpu", devices=1, num_nodes=2)
    with pytest.raises(LaunchError, match=r"no function to run .* `fabric.launch\(train\)`"):
        fabric.launch()
    losses, ranks = fabric.launch(train_with_fabric)
    assert ranks == [0, 0, 2]
    alone = Fabric(accelerator="cpu", devices=1)
    assert losses == pytest.approx(alone.launch(train_with_fabric)[0], rel=1e-5)


def count(folder: Path) -> int:
    return len(steps_of(folder)) if (folder / "steps.jsonl").exists() else 0


def wait_for(condition: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def in_the_background(action: Any) -> Any:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(60)
