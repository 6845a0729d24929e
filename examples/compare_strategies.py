"""Train a small GPT from scratch under five strategies, and draw their losses on one pair of axes.

    python examples/compare_strategies.py --plot docs/assets/strategies.svg

The text are docstrings of installed packages. Exit code 0 if every loss is near that of the first strategy.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt.data import GlobalBatches, ResumableLoader, Windows
from gpt.model import GPTConfig
from gpt.module import LitGPT
from gpt.report import Losses, largest_difference, read_losses
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure

__all__ = ["docstrings", "draw", "main", "train"]

STRATEGIES = ("ddp", "fsdp_auto", "nnscaler_pp", "colossalai", "nnx_deepspeed_3")
PACKAGES = ("torch", "lightning", "numpy")
GLOBAL_BATCH = 12


def docstrings(package: str, limit: int) -> bytes:
    """The first `limit` bytes of the docstrings of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None, package
    text = bytearray()
    for path in sorted(Path(found.origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text += f"{ast.get_docstring(node) or ''}\n".encode()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Text(LitGPT):
    """The GPT, with a loader that gives each rank its share of every global batch."""

    def configure_optimizers(self) -> Any:
        """An eps above the rounding of a rare byte's gradient, which Adam would turn into a full step."""
        found: Any = super().configure_optimizers()
        for group in found["optimizer"].param_groups:
            group["eps"] = 1e-5
        return found

    def train_dataloader(self) -> ResumableLoader:
        """The same global batches under every strategy."""
        text = b"".join(docstrings(package, limit=100_000) for package in PACKAGES)
        windows = Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), GPTConfig().context)
        share = self.trainer.distributed_sampler_kwargs or {}
        order = GlobalBatches(len(windows), batches=self.steps, global_batch=GLOBAL_BATCH, seed=1, **share)
        return ResumableLoader(windows, order)


def train(strategy: str, out: Path, steps: int) -> None:
    """Train on two processes, and write the loss of every step to ``out/STRATEGY/metrics.csv``."""
    seed_everything(1, verbose=False)
    off = ("use_distributed_sampler", "enable_checkpointing", "enable_progress_bar")
    where: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "devices": 2}
    logger = CSVLogger(out, name=strategy, version="")
    length: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 1.0, "log_every_n_steps": 1}
    trainer = Trainer(logger=logger, **where, **length, **dict.fromkeys(off, False))
    trainer.fit(Text(GPTConfig(), steps=steps))


def draw(path: Path, losses: Mapping[str, Losses]) -> None:
    """Draw the losses, and below them their distances from the first ones."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    (first, reference), *others = losses.items()
    above.plot(*zip(*reference.train.items(), strict=True), color="0.75", linewidth=5, label=first)
    for number, (name, run) in enumerate(others):
        style = {"color": f"C{number}", "linewidth": 2, "linestyle": (3 * number, (3, 9))}
        above.plot(*zip(*run.train.items(), strict=True), label=name, **style)
        distances = [abs(loss - reference.train[step]) for step, loss in run.train.items()]
        below.plot(list(run.train), distances, color=f"C{number}")
    above.set(ylabel="loss per byte (nats)", title="One training under five strategies, two processes each")
    below.set(xlabel="step", ylabel=f"distance from {first}", yscale="log")
    above.legend(frameon=False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainings one after the other, draw them, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("out/strategies"), help="directory of the losses")
    parser.add_argument("--plot", type=Path, default=Path("out/strategies/losses.svg"), help="the picture")
    parser.add_argument("--only", choices=STRATEGIES, help="train under this strategy, and draw nothing")
    given = parser.parse_args(arguments)
    if given.only:
        train(given.only, given.out, given.steps)
        return 0
    for name in STRATEGIES:
        command = [sys.executable, __file__, f"--only={name}", f"--out={given.out}", f"--steps={given.steps}"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    losses = {name: read_losses(given.out / name / "metrics.csv") for name in STRATEGIES}
    draw(given.plot, losses)
    worst = {name: largest_difference(losses["ddp"], run) for name, run in losses.items()}
    print(*(f"{name:16} at most {distance:.1e} from ddp" for name, distance in worst.items()), sep="\n")
    return int(max(worst.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
