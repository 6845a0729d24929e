"""Groups whose processes are actors of Ray: one actor is killed, its group heals, the weights are exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("nnx_torchft._torchft_compat", reason="torchft is not installed")
pytest.importorskip("ray", reason="ray is not installed")

from test_elastic import address_of, new_lighthouse

SCRIPT = """
import os, sys, time
from pathlib import Path
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
import nnx

group, lighthouse = sys.argv[1:]

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        self.net = torch.nn.Sequential(*layers).double()

    def training_step(self, batch, index):
        if lighthouse:
            time.sleep(0.2)
            Path(f"{group}.{os.environ['RANK']}").write_text(f"{os.getpid()} {self.trainer.global_step}")
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

pl.seed_everything(3)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
elastic = {"lighthouse": lighthouse, "run_id": "on-ray", "group": group, "group_timeout": 5.0}
ray = {"launcher": "ray", "address": "local", "weights": "rank0"}
trainer = pl.Trainer(
    strategy=nnx.strategy("torchft_hsdp", **elastic, **ray) if lighthouse else "auto",
    accelerator="cpu",
    devices=2 if lighthouse else 1,
    max_epochs=40,
    precision="64-true",
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=12))
torch.save(model.net.state_dict(), f"{group}.pt")
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_actor_costs_no_sample(tmp_path: Path) -> None:
    import torch

    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    lighthouse = new_lighthouse()
    address = address_of(lighthouse)

    def start(group: str, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "train.py", group, address]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, text=True)

    def pid_at(path: Path, step: int) -> int:
        until = time.monotonic() + 200
        while True:
            text = path.read_text() if path.exists() else ""
            if text and int(text.split()[1]) >= step:
                return int(text.split()[0])
            assert time.monotonic() < until and all(each.poll() is None for each in groups)
            time.sleep(0.05)

    groups = [start(name, address) for name in ("a", "b")]
    try:
        killed = pid_at(tmp_path / "b.1", 8)
        os.kill(killed, signal.SIGKILL)
        assert [group.wait(400) for group in groups] == [0, 0]
    finally:
        for group in groups:
            if group.poll() is None:
                os.killpg(group.pid, signal.SIGKILL)
        lighthouse.shutdown()
    assert int((tmp_path / "b.1").read_text().split()[0]) != killed  # another actor took its place
    assert start("late", address).wait(200) == 0  # the run has ended, which is no error
    assert not (tmp_path / "late.0").exists()
    assert not (tmp_path / "late.pt").exists()
    assert start("alone", "").wait(200) == 0
    alone = torch.load(tmp_path / "alone.pt")
    for name in ("a", "b"):
        ended = torch.load(tmp_path / f"{name}.pt")
        assert max(float((ended[key] - alone[key]).abs().max()) for key in alone) <= 1e-12
