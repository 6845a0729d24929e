"""Steps of several strategies on two nodes, over links of three rates: seconds, and bytes on the link.

    python benchmarks/slow_nodes.py [--rates 10gbit 1gbit 100mbit] [--steps 8] [--plot slow_nodes.svg]

Two nodes of two processes each are namespaces of this machine (`tests/nodes/laboratory.py`; needs root and
iproute2). Every strategy trains the same layers, a Linear of 512 x 512 eight times, at every rate in one run;
ratios are to ``ddp`` at the same rate. Bytes are those that a node sends over its link in one step, as the
kernel counts them, in units of the bytes of all parameters; beside them stands the formula (see `FORMULA`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from nodes.laboratory import Laboratory, why_not  # noqa: E402

WIDTH, LAYERS, BATCH = 512, 8, 8
BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
STRATEGIES = ("ddp", "fsdp_auto", "fsdp_hybrid", "nnscaler_dp", "nnscaler_zero", "nnscaler_deduped")
FORMULA = {
    # A ring over four ranks, of which one sends to the other node: an all-reduce sends 2 * 3/4 of everything.
    "ddp": 2 * 3 / 4,
    "nnscaler_dp": 2 * 3 / 4,
    # Two gathers of 3/4, and a reduction to shards, which torch makes of an all-reduce over gloo.
    "fsdp_auto": 2 * 3 / 4 + 2 * 3 / 4,
    # Two gathers and a reduce-scatter, 3/4 each.
    "nnscaler_zero": 3 * 3 / 4,
    # Two pairs of ranks, each an all-reduce over two of half of everything.
    "fsdp_hybrid": 2 * (2 * 1 / 2) / 2,
    # A unit is a node, whose ranks split every weight; the gradients of a half are averaged over two units.
    "nnscaler_deduped": 2 * (2 * 1 / 2) / 2,
}
SCRIPT = """
import json, sys, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
strategy, steps, width, layers, batch = json.loads(sys.argv[1])

def sent():
    (line,) = (line for line in open("/proc/net/dev") if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])

class Times(Callback):
    def on_train_start(self, *_):
        self.last = time.monotonic()
    def on_train_batch_end(self, trainer, *_):
        now = time.monotonic()
        if trainer.is_global_zero:
            print("STEP", trainer.global_step, now - self.last, sent(), flush=True)
        self.last = now

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    def forward(self, x):
        return self.layers(x)
    def training_step(self, batch, index):
        return self(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(1000, width), batch_size=batch)

name = strategy
if strategy.startswith("fsdp"):
    import nnx
    name = nnx.strategy(strategy, min_num_params=width * width)
Trainer(strategy=name, accelerator="cpu", devices=2, num_nodes=2, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Times()]).fit(Model())
"""


def measure(lab: Laboratory, strategy: str, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and the bytes that node 0 sends in one, by the parameters' bytes."""
    words = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=node0"]
    script = lab.shared / "train.py"
    script.write_text(SCRIPT)
    job = json.dumps([strategy, steps, WIDTH, LAYERS, BATCH])
    runs = [
        node.start(
            sys.executable,
            *words,
            f"--node-rank={node.number}",
            str(script),
            job,
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests" / "startup")},
        )
        for node in lab.nodes
    ]
    for run in runs:
        ended = run.wait(600)
        if ended.code:
            raise SystemExit(f"{strategy} ended with {ended.code}:\n{ended.output[-2000:]}")
    lines = [line.split() for line in runs[0].output.splitlines() if line.startswith("STEP ")]
    sent = int(lines[-1][3]) - int(lines[1][3])
    return median(float(line[2]) for line in lines[2:]), sent / (steps - 2) / BYTES


def plot(path: str, rates: list[str], seconds: dict[str, list[float]]) -> None:
    """Draw seconds of a step over the rates."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for strategy, values in seconds.items():
        axes.plot(rates, values, marker="o", label=strategy)
    axes.set_yscale("log")
    axes.set_xlabel("rate of each node's link")
    axes.set_ylabel("seconds of a step")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "100mbit"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plot", default="")
    given = parser.parse_args()
    if why_not():
        raise SystemExit(f"no laboratory here: {why_not()}")
    begun = time.monotonic()
    print(f"parameters: {BYTES / 1e6:.1f} MB; 2 nodes x 2 processes; medians of {given.steps - 2} steps")
    print(
        f"{'strategy':<16}{'sent':>7}{'formula':>9}"
        + "".join(f"{rate:>11}{'/ ddp':>8}" for rate in given.rates)
    )
    seconds: dict[str, list[float]] = {}
    for strategy in given.strategies:
        seconds[strategy], sent = [], []
        for rate in given.rates:
            with (
                tempfile.TemporaryDirectory() as top,
                Laboratory(2, folder=Path(top) / "lab", rate=rate) as lab,
            ):
                step, share = measure(lab, strategy, given.steps)
            seconds[strategy].append(step)
            sent.append(share)
        first = seconds[given.strategies[0]]
        cells = "".join(
            f"{own:>9.3f} s{own / other:>8.2f}" for own, other in zip(seconds[strategy], first, strict=True)
        )
        print(
            f"{strategy:<16}{median(sent):>7.2f}{FORMULA.get(strategy, float('nan')):>9.2f}{cells}",
            flush=True,
        )
    if given.plot:
        plot(given.plot, given.rates, seconds)
    print(f"took {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
