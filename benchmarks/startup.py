"""Time from `python train.py` to the end of the first step, under strategies of nnx and Lightning's `ddp`.

    python benchmarks/startup.py [--rounds 7] [--strategies fsdp_auto nnscaler_dp]

Each round starts a script of two processes once for each strategy, in turn. The clock starts before the
process does and stops in `on_train_batch_end` of the first batch on rank 0. The script also prints the times
of the imports, of Trainer's construction, and of the rest up to the step. Bar: at most 1.10 times
the time of `ddp`, by the medians. Quiet machines only: imports vary by tenths of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 1.10
SCRIPT = """
import sys, time
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
imported = time.time()

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    def training_step(self, batch, index):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            print("TIMES", imported, built, time.time(), flush=True)

trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
built = time.time()
trainer.fit(Net(), DataLoader(torch.randn(32, 64), batch_size=8))
"""


def start(script: Path, strategy: str) -> tuple[float, float, float]:
    """Seconds until Lightning is imported, the Trainer is built, and the first step is done."""
    begun = time.time()
    done = subprocess.run(
        [sys.executable, str(script), strategy],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TIMES")]
    imported, built, stepped = (float(word) - begun for word in line.split()[1:])
    return imported, built, stepped


def main() -> int:
    """Print the medians and the ratios; 1 if one is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategies", nargs="+", default=["fsdp_auto", "nnscaler_dp"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = ["ddp", *arguments.strategies]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for number in range(arguments.rounds + 1):
            for name in names if number % 2 else reversed(names):
                times = start(script, name)
                if number:  # the first warms the disk's cache
                    found[name].append(times)
    medians = {
        name: [statistics.median(part) for part in zip(*rows, strict=True)] for name, rows in found.items()
    }
    ratios = {name: medians[name][2] / medians["ddp"][2] for name in arguments.strategies}
    if arguments.json:
        print(json.dumps({"seconds": medians, "ratios": ratios}))
    else:
        for name, (imported, built, stepped) in medians.items():
            ratio = f", {ratios[name]:.3f} of ddp" if name in ratios else ""
            print(f"{name}: imported {imported:.2f} s, Trainer {built:.2f} s, step {stepped:.2f} s{ratio}")
    return int(max(ratios.values()) > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
