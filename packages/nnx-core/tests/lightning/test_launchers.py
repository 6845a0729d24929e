"""Launchers are found by name or refused with a remedy, and return a run's results."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Trainer

import nnx
from jobs.spawning_launcher import SpawningLauncher
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer
from nnx_core.errors import LaunchError, OptionError, UnsupportedError
from nnx_core.launch.launcher import LauncherOptions, last_committed, make_launcher, variables
from nnx_core.lightning.launcher import LightningLauncher

DECLARED = """
    from nnx_core import LauncherSpec, hookimpl

    @hookimpl
    def nnx_launchers():
        return [LauncherSpec("acme", "{target}", needs={needs})]
"""
TASK = Task(steps=3, clip=0.5, optimizer="adamw")


def provide(site, target="jobs.spawning_launcher:SpawningLauncher", needs=None):
    site.add("acme-launcher", DECLARED.format(target=target, needs=needs or {}))


def trainer_of(strategy: str, launcher, **settings) -> Trainer:
    subject = Subject(strategy, options={"launcher": launcher})
    return make_trainer(subject, TASK, devices=2, num_nodes=1, **settings)


def test_a_plugin_provides_a_launcher_by_name_and_its_options_are_told_from_the_strategys(site):
    provide(site)
    made = nnx.strategy("fsdp_auto", launcher="acme", weights="rank0", timeout=77.0)
    trainer = Trainer(strategy=made, accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy.launcher, LightningLauncher)
    assert trainer.strategy.launcher.launcher.options.weights == "rank0"
    assert made.common.timeout == 77.0
    assert made.common.gather_at_end == "rank0"


def test_an_unknown_launcher_option_or_strategy_is_named_with_what_there_is(site):
    provide(site)
    with pytest.raises(OptionError, match=r"launcher='acne' is unknown\. Did you mean 'acme'"):
        nnx.strategy("fsdp_auto", launcher="acne")
    with pytest.raises(OptionError, match=r"no option 'weihgts'.* launcher's own options are weights"):
        nnx.strategy("fsdp_auto", launcher="acme", weihgts="rank0")
    with pytest.raises(OptionError, match="weights='all' is not allowed"):
        nnx.strategy("fsdp_auto", launcher="acme", weights="all")
    with pytest.raises(OptionError, match="SingleDeviceStrategy is a strategy of one process"):
        nnx.strategy("single_device", launcher="acme", device="cpu")
    with pytest.raises(OptionError, match="weights='rank0' is not possible with FSDPStrategy"):
        nnx.strategy("fsdp", launcher="acme", weights="rank0")


def test_what_a_launcher_needs_is_named_where_it_is_missing(site, monkeypatch):
    provide(site, needs={"acme_cluster": "acme[train]"})
    with pytest.raises(LaunchError, match=r"needs acme\[train\].* Run `pip install 'acme\[train\]'`"):
        nnx.strategy("fsdp_auto", launcher="acme")
    site.hide("nnx-ray")
    nnx.StrategyRegistry.refresh()
    with pytest.raises(
        ImportError, match=r"package nnx-ray, which is not installed. Run `pip install nnx-ray`"
    ):
        nnx.strategy("fsdp_auto", launcher="ray")


def test_a_target_that_is_no_launcher_is_refused(site):
    provide(site, target="builtins:dict")
    with pytest.raises(nnx.NnxError, match=r"'builtins:dict', which is no nnx_core.launch.launcher.Launcher"):
        make_launcher("acme", {})


def test_what_has_been_started_already_is_not_started_again(site, monkeypatch):
    provide(site)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    trainer = Trainer(strategy=nnx.strategy("fsdp_auto", launcher="acme"), accelerator="cpu", logger=False)
    assert trainer.strategy.launcher is None


def test_torchrun_starts_scripts_and_says_so():
    trainer = trainer_of("fsdp_auto", "torchrun")
    with pytest.raises(LaunchError, match=r"nnx run --on torchrun -- train.py"):
        trainer.fit(TASK.module())


def test_ranks_of_a_node_follow_one_another():
    ranks = [variables(rank, nodes=2, devices=3, address="node0", port=1) for rank in range(6)]
    assert [each["GROUP_RANK"] for each in ranks] == list("000111")
    assert [each["LOCAL_RANK"] for each in ranks] == list("012012")
    assert {each["WORLD_SIZE"] for each in ranks} == {"6"}


@pytest.mark.full
def test_a_sharded_run_brings_back_all_but_the_weights_and_tells_who_looks_for_them(tmp_path):
    launcher = SpawningLauncher()
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer, module = trainer_of("fsdp_auto", launcher, **saving), TASK.module()
    trainer.fit(module)
    assert trainer.global_step == TASK.steps
    assert trainer.state.finished
    path = trainer.checkpoint_callback.best_model_path
    assert last_committed([path, str(tmp_path / "never")]) == (path, TASK.steps)
    assert next(module.parameters()).is_meta
    with pytest.raises(UnsupportedError, match="those of its last run stayed in the processes"):
        trainer_of("fsdp_auto", launcher).fit(module)
    trainer = trainer_of("fsdp_auto", SpawningLauncher(LauncherOptions(weights="rank0")), max_steps=4)
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == 4
    assert all(value.isfinite().all() and not value.is_meta for value in module.state_dict().values())


@pytest.mark.full
def test_the_weights_of_a_replicated_run_come_back_and_are_those_of_one_process():
    alone, module, raw = TASK.module(), TASK.module(), TASK.module()
    make_trainer(Subject("nnscaler_dp"), TASK, devices=1).fit(alone)
    trainer_of("nnscaler_dp", SpawningLauncher()).fit(module)
    trainer_of("ddp", SpawningLauncher()).fit(raw)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(raw.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_scripts_are_started_by_torchrun(tmp_path):
    script = tmp_path / "train.py"
    # In one piece: what Python prints without a buffer may be cut by what the other rank prints.
    script.write_text("import os, sys\nsys.stdout.write(f\"RANK {os.environ['RANK']} {sys.argv[1]}\\n\")\n")
    words = [sys.executable, "-m", "nnx", "run", "--on", "torchrun", "--devices", "2", "--", str(script), "a"]
    finished = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["RANK 0 a", "RANK 1 a"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--on", "slurm"], "srun --nodes=2 --ntasks-per-node=4 {python} train.py --steps 3"),
        (
            ["--on", "torchrun", "--option", "master_addr=node0"],
            "torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=0 --node-rank=0 --master-addr=node0 "
            "--master-port=29500 train.py --steps 3",
        ),
    ],
)
def test_a_dry_run_prints_what_would_be_started(words, expected):
    words = [*words, "--nodes", "2", "--devices", "4", "--dry-run", "--", "train.py", "--steps", "3"]
    command = [sys.executable, "-m", "nnx", "run", *words]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.split() == expected.format(python=sys.executable).split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--on", "torchrun", "--nodes", "2", "--", "a.py"], "no master_addr is given"),
        (["--on", "torchrun"], "no script is given"),
        (["--on", "torchrun", "--option", "node_rank", "--", "a.py"], "--option 'node_rank' has no value"),
        (["--on", "slurm", "--option", "x=1", "--", "a.py"], "launcher 'slurm' has no option 'x'"),
        (["--on", "slurm", "--", "a.py"], "there is no srun on the PATH"),
    ],
)
def test_wrong_usage_of_run_is_one_error_with_a_remedy(words, expected, capsys, monkeypatch):
    from nnx_checkpoint.cli.command import main

    monkeypatch.setattr(sys, "argv", ["nnx", "run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert f"error: {expected}" in printed or expected in printed.splitlines()[0]
    assert "remedy: " in printed
