"""Ways of starting processes, each from a script as a user would write it.

A launch takes as long as dozens of other tests. The start of a plain script by Lightning is tested here with
the other copy of Lightning and under the command line, in `tests/test_main_job.py`, and by the check
`launched_by_lightning` of each engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.thread_jobs import threads_of_a_run
from nnx_conformance.pool import WorkerPool

MODEL = """
    import json, os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from {package} import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self, width: int = 16):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
            self.ranks = []

        def training_step(self, batch, index):
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.layers(inputs), targets)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def train_dataloader(self):
            generator = torch.Generator().manual_seed(2)
            inputs = torch.randn(16, 4, generator=generator)
            return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16 // {devices})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False)

    def report(trainer, module):
        rank = trainer.global_rank
        with open(f"report-{{rank}}.json", "w") as file:
            json.dump({{
                "loss": float(trainer.callback_metrics["loss"]),
                "weights": [round(float(p.detach().double().sum()), 6) for p in module.parameters()],
                "plain": all(type(p) is nn.Parameter for p in module.parameters()),
                "world": trainer.world_size,
                "strategy": trainer.strategy.name,
                "tree": trainer.strategy.root,
                "pid": os.getpid(),
            }}, file)
"""
FIT = """
    if __name__ == "__main__":
        module = Model()
        trainer = Trainer(strategy={strategy}, accelerator="cpu", devices={devices}, max_epochs=3, **quiet)
        trainer.fit(module)
        report(trainer, module)
"""
CLI = """
    from lightning.pytorch.cli import LightningCLI

    if __name__ == "__main__":
        cli = LightningCLI(Model, save_config_callback=None, trainer_defaults=dict(max_epochs=3, **quiet))
        report(cli.trainer, cli.model)
"""

Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Write a script, start it, and return the report of each rank."""

    def run(
        body: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        devices: int = 2,
        strategy: str = '"fsdp_auto"',
        package: str = "lightning.pytorch",
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("launch")
        source = textwrap.dedent(MODEL).format(package=package, devices=devices)
        source += textwrap.dedent(body).format(strategy=strategy, devices=devices)
        (folder / "train.py").write_text(source)
        settings = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, *before, "train.py", *arguments],
            cwd=folder,
            env={**settings, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("report-*.json"))]

    return run


@pytest.fixture(scope="module")
def check() -> Callable[..., None]:
    """Compare the reports of the ranks with three steps of plain PyTorch."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.mse_loss(layers(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [float(p.detach().double().sum()) for p in layers.parameters()]

    def check(reports: list[dict[str, Any]], *, ranks: int = 2, tree: str = "lightning.pytorch") -> None:
        assert len({report["pid"] for report in reports}) == len(reports) == ranks
        for report in reports:
            assert report["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert report["weights"] == pytest.approx(weights, abs=1e-5)
            assert (report["world"], report["plain"], report["strategy"]) == (2, True, "fsdp_auto")
            assert report["tree"] == tree

    return check


@pytest.mark.full
def test_torchrun(launch: Launch, check: Callable[..., None]) -> None:
    check(launch(FIT, before=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")))


@pytest.mark.full
def test_spawned_processes_bring_the_weights_back(launch: Launch, check: Callable[..., None]) -> None:
    check(launch(FIT, strategy='__import__("nnx").strategy("fsdp_auto", start_method="spawn")'), ranks=1)


@pytest.mark.full
def test_the_other_copy_of_lightning(launch: Launch, check: Callable[..., None]) -> None:
    check(launch(FIT, package="pytorch_lightning"), tree="pytorch_lightning")


@pytest.mark.full
def test_lightning_cli(launch: Launch, check: Callable[..., None]) -> None:
    trainer = ("--trainer.strategy", "fsdp_auto", "--trainer.accelerator", "cpu", "--trainer.devices", "2")
    check(launch(CLI, "fit", *trainer))


@pytest.mark.full
def test_a_process_leaves_its_group_before_the_interpreter_goes() -> None:
    script = """
import atexit
import torch.distributed as dist
from lightning.fabric import Fabric

atexit.register(lambda: print("in a group at exit:", dist.is_initialized()))
Fabric(strategy="fsdp_auto", accelerator="cpu", devices=1).launch()
print("in a group:", dist.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["in a group: True", "in a group at exit: False"]


def test_ranks_on_cpu_compute_with_equal_numbers_of_threads(pool: WorkerPool) -> None:
    """Lightning's launcher leaves rank 0 with fewer, and replicas would drift apart in the last bit."""
    assert pool.run(threads_of_a_run, "fsdp_auto", world_size=2) == [2, 2]
