"""Milliseconds of a step: plain Lightning, `torchft_ddp`, and a bare loop over torchft's manager.

    python benchmarks/elastic_step.py --steps 400

The model is tiny, so that the cost of the quorum, the sum and the commit shows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

HIDDEN, BATCH = 64, 12


def lightning(address: str, group: str, folder: str, steps: int, groups: int) -> None:
    """Train with a Trainer; without groups, in one plain process."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import nnx

    torch.set_num_threads(1)
    ends: list[float] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(16, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)
            )

        def training_step(self, batch: Any, index: int) -> Any:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    chosen: Any = "auto"
    if groups:
        chosen = nnx.strategy("torchft_ddp", lighthouse=address, group=group, min_groups=groups)
    trainer = pl.Trainer(
        strategy=chosen,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    x = torch.randn(BATCH * steps, 16)
    trainer.fit(Model(), DataLoader(TensorDataset(x, x[:, :1]), batch_size=BATCH))
    _write(folder, group, ends)


def bare(address: str, group: str, folder: str, steps: int, groups: int) -> None:
    """Train the same model in a loop over torchft's manager, as its documentation has it."""
    import torch
    from torch.distributed import TCPStore

    from nnx_torchft._torchft_compat import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=groups,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{address}",
        replica_id=group,
    )
    x, ends = torch.randn(BATCH * steps, 16), []
    while manager.current_step() < steps:
        first = BATCH * manager.current_step()
        optimizer.zero_grad()
        manager.start_quorum()
        rows = x[first : first + BATCH // groups]
        (model(rows) - rows[:, :1]).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
        ends.append(time.perf_counter())
    _write(folder, group, ends)
    time.sleep(1)


def _write(folder: str, group: str, ends: list[float]) -> None:
    laps = [1000 * (after - before) for before, after in pairwise(ends[50:])]
    (Path(folder) / f"{group}.json").write_text(json.dumps(statistics.median(laps)))


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from nnx_torchft._torchft_compat import LighthouseServer

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "nnx", "nnx_torchft.strategy"])
    sides = [
        ("plain Lightning", lightning, 0),
        ("torchft_ddp, 1 group", lightning, 1),
        ("torchft_ddp, 2 groups", lightning, 2),
        ("torchft's loop, 2 groups", bare, 2),
    ]
    for _ in range(given.repeats):
        for name, work, groups in sides:
            lighthouse = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, quorum_tick_ms=20
            )
            address = f"127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
            with tempfile.TemporaryDirectory() as folder:
                names = [f"g{index}" for index in range(max(groups, 1))]
                processes = [
                    context.Process(target=work, args=(address, each, folder, given.steps, groups))
                    for each in names
                ]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                medians = [json.loads((Path(folder) / f"{each}.json").read_text()) for each in names]
            print(f"{name:26} {max(medians):6.1f} ms per step (load {os.getloadavg()[0]:.0f})", flush=True)
            lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
