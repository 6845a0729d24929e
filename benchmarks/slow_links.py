"""Compare the strategies for slow links with `ddp`: the loss at equal samples, and the bytes that travel.

    python benchmarks/slow_links.py --steps 300 --seeds 1 [--model gpt]
    python benchmarks/slow_links.py --steps 600 --seeds 3 --curve docs/assets/slow_links.svg
    python benchmarks/slow_links.py --cost
    python benchmarks/slow_links.py --rate 100mbit --batch 128

Two processes of this machine train a small LSTM or GPT on the source of torch.nn, with the same batches each
time. Prints a table of validation losses, their difference from `ddp`, and bytes beside the formula. Exit
code 1 if bytes differ from the formula by more than 1 %, or if a loss is above its bar (`BARS`).

``--curve`` draws the validation loss of `CURVES` over the steps, for each model, as means over the seeds.
``--cost`` compares the processor time of `bagua` with that of `ddp`, in runs that take turns. ``--rate``
limits the link between two nodes, see `slow_links_rate`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from slow_links_rate import compare_rate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import nnx
from nnx_comm import QAdam
from nnx_conformance.pool import WorkerPool

BATCH, LENGTH, RANKS, INTERVAL = 16, 64, 2, 20
BARS = {"bagua bf16": 0.5, "bagua_bytegrad": 0.5, "powersgd rank 48": 0.5, "diloco": 6.0}
"""The largest excess over ddp's loss in percent."""
COST = 1.03
"""The largest processor time of `bagua`, as a multiple of that of `ddp`."""
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "bagua": ("bagua", {}),
    "bagua bf16": ("bagua", {"codec": "bf16"}),
    "bagua_bytegrad": ("bagua_bytegrad", {}),
    "bagua topk 1 %": ("bagua", {"codec": "topk"}),
    "bagua_qadam": ("bagua_qadam", {}),
    "powersgd": ("powersgd", {}),
    "powersgd rank 16": ("powersgd", {"matrix_approximation_rank": 16}),
    "powersgd rank 32": ("powersgd", {"matrix_approximation_rank": 32}),
    "powersgd rank 48": (
        "powersgd",
        {"matrix_approximation_rank": 48, "min_compression_rate": 1.2, "start_powerSGD_iter": 60},
    ),
    "fsdp_hybrid_compressed": ("fsdp_hybrid_compressed", {"replicate_size": 2}),
    "localsgd": ("localsgd", {"interval": INTERVAL}),
    "bagua_decentralized": ("bagua_decentralized", {}),
    "bagua_low_precision_decentralized": ("bagua_low_precision_decentralized", {}),
    "bagua_async": ("bagua_async", {"interval": INTERVAL}),
    "diloco": ("diloco", {"interval": INTERVAL}),
    "diloco int8": ("diloco", {"interval": INTERVAL, "codec": "int8"}),
    "diloco_streaming": ("diloco_streaming", {"interval": INTERVAL}),
}
CURVES = (
    *("ddp", "bagua bf16", "bagua_bytegrad", "powersgd rank 32"),
    *("localsgd", "bagua_decentralized", "diloco"),
)
FORMULAS: dict[str, Callable[[int], float]] = {
    "bagua": lambda n: 4 * n,
    "bagua bf16": lambda n: 2 * n,
    "bagua_bytegrad": lambda n: n * (1 + 4 / 512),
    "bagua topk 1 %": lambda n: 8 * n * 0.01,
    "fsdp_hybrid_compressed": lambda n: 2 * n,
    "localsgd": lambda n: 4 * n / INTERVAL,
    "bagua_decentralized": lambda n: 4 * n,
    "bagua_low_precision_decentralized": lambda n: n * (1 + 4 / 512),
    "bagua_async": lambda n: 4 * n / INTERVAL,
    "diloco": lambda n: 4 * n / INTERVAL,
    "diloco int8": lambda n: n * (1 + 4 / 512) / INTERVAL,
    "diloco_streaming": lambda n: 4 * n / INTERVAL,
}
"""The bytes of a step between two ranks, for n trained elements."""


def characters() -> tuple[Tensor, int]:
    """Return the source of torch.nn as numbers, and how many different ones there are."""
    paths = sorted((Path(torch.__file__).parent / "nn" / "modules").glob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in paths)[:600_000]
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


class Excerpts(Dataset[Tensor]):
    """This rank's excerpts of the training text, drawn from the seed, the step and the rank."""

    def __init__(self, text: Tensor, seed: int, rank: int) -> None:
        self.text, self.seed, self.rank = text, seed, rank

    def __getitem__(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 31 + self.rank)
        return excerpts(self.text, BATCH, generator)

    def __len__(self) -> int:
        return 1_000_000


def excerpts(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return random excerpts, one character longer than what is predicted."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


class Reader(LightningModule):
    """Predicts the next character."""

    def __init__(self, letters: int, steps: int, seed: int, *, uses_qadam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps, self.uses_qadam = steps, uses_qadam
        self.curve: list[tuple[int, float]] = []
        self.build(letters)

    def build(self, letters: int) -> None:
        """Create the layers."""
        self.embed, self.head = nn.Embedding(letters, 64), nn.Linear(128, letters)
        self.lstm = nn.LSTM(64, 128, batch_first=True)

    def hidden(self, seen: Tensor) -> Tensor:
        """Return the state after each character."""
        return self.lstm(self.embed(seen))[0]  # type: ignore[no-any-return]

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        outputs = self.head(self.hidden(batch[:, :-1]))
        return cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss."""
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Record the loss."""
        self.curve.append((self.trainer.global_step, float(self.loss(batch))))

    def configure_optimizers(self) -> Any:
        """Return AdamW or QAdam with warm-up and decay."""
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        if self.uses_qadam:
            optimizer = QAdam(self.parameters(), lr=3e-3, warmup_steps=max(1, self.steps // 4))

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 50) * (0.1 + 0.9 * max(0.0, 1 - step / self.steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Attentive(Reader):
    """Predicts the next character with two causal attention layers."""

    def build(self, letters: int) -> None:
        """Create the layers."""
        self.embed, self.head = nn.Embedding(letters, 96), nn.Linear(96, letters)
        self.places = nn.Embedding(LENGTH, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def hidden(self, seen: Tensor) -> Tensor:
        """Return the state after each character."""
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        return self.layers(self.embed(seen) + self.places.weight, mask=mask, is_causal=True)  # type: ignore[no-any-return]


MODELS: dict[str, type[Reader]] = {"lstm": Reader, "gpt": Attentive}


def train(
    kind: str, name: str, options: dict[str, Any], steps: int, seed: int, every: int = 0
) -> dict[str, Any]:
    """Train on this rank, and return the validation loss, the bytes sent and the number of elements.

    Args:
        kind: A model of `MODELS`.
        name: The strategy.
        options: Its options.
        steps: Optimizer steps.
        seed: Of the weights and the batches.
        every: Steps between two points of the curve that it also returns; 0 for none.
    """
    torch.set_num_threads(1)
    text, letters = characters()
    cut = int(len(text) * 0.95)
    model = MODELS[kind](letters, steps, seed, uses_qadam=name == "bagua_qadam")
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(
        strategy=nnx.strategy(name, **options), accelerator="cpu", devices=RANKS, max_steps=steps,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=every or None, num_sanity_val_steps=0,
    )  # fmt: skip
    held_out = excerpts(text[cut:], 256, torch.Generator().manual_seed(99))
    evaluation = DataLoader([held_out], batch_size=None) if every else None
    trainer.fit(model, DataLoader(Excerpts(text[:cut], seed, rank), batch_size=None), evaluation)
    with torch.no_grad():
        loss = model.loss(held_out)
    sent = getattr(getattr(trainer.strategy, "backend", None), "total", 0)
    return {
        "loss": float(loss),
        "curve": model.curve,
        "bytes": sent / steps,
        "elements": float(sum(parameter.numel() for parameter in model.parameters())),
    }


class Layers(LightningModule):
    """Has 2.4 million elements in four layers, and counts processor time from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (256, 1024, 1024, 1024, 16)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))
        self.begun = self.spent = 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss."""
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        """Start the clock."""
        if index == 3:
            self.begun = time.process_time()

    def on_train_end(self) -> None:
        """Stop the clock."""
        self.spent = time.process_time() - self.begun


def spend(name: str, steps: int) -> float:
    """Return the processor time of this rank for a step, in milliseconds."""
    torch.set_num_threads(1)
    module = Layers()
    trainer = Trainer(
        strategy=name, accelerator="cpu", devices=RANKS, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(32 * 2 * steps, 256), batch_size=32))
    return module.spent / (steps - 3) * 1e3


def compare_cost(steps: int) -> int:
    """Print the processor time of a step under `ddp` and `bagua`; return 1 if the ratio is above its bar."""
    spent: dict[str, list[float]] = {"ddp": [], "bagua": []}
    with WorkerPool(size=RANKS) as pool:
        for _ in range(5):
            for name, found in spent.items():
                found.append(sum(pool.run(spend, name, steps, world_size=RANKS, timeout=600)))
            print("  ".join(f"{name} {found[-1]:.1f} ms" for name, found in spent.items()), flush=True)
    middle = {name: statistics.median(found) for name, found in spent.items()}
    ratio = middle["bagua"] / middle["ddp"]
    print(f"medians: {middle['ddp']:.1f} and {middle['bagua']:.1f} ms; ratio {ratio:.3f}, at most {COST}")
    return int(ratio > COST)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", choices=list(MODELS), default="lstm")
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--curve", type=Path, help="draw losses over the steps into this file")
    parser.add_argument("--cost", action="store_true", help="compare processor time")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank in a step of --rate")
    parser.add_argument("--rate", default="", help="limit the link between two nodes, such as 100mbit")
    given = parser.parse_args()
    if given.cost:
        return compare_cost(given.steps)
    if given.rate:
        labels = [label for label in given.only if label in FORMULAS]
        return compare_rate(given.rate, labels, FORMULAS, STRATEGIES, batch=given.batch)
    if given.curve:
        draw_curves(given.curve, given.steps, given.seeds)
        return 0
    return compare_losses(given)


def draw_curves(file: Path, steps: int, seeds: int) -> None:
    """Draw the validation loss of `CURVES` over the steps, and print it."""
    import matplotlib.pyplot as plt

    figure, columns = plt.subplots(1, len(MODELS), figsize=(9, 3.5))
    with WorkerPool(size=RANKS) as pool:
        for column, kind in zip(columns, MODELS, strict=True):
            for label in CURVES:
                curves = [
                    pool.run(
                        train, kind, *STRATEGIES[label], steps, seed, steps // 12,
                        world_size=RANKS, timeout=3600,
                    )[0]["curve"]
                    for seed in range(seeds)
                ]  # fmt: skip
                points = [
                    (at[0][0], statistics.mean(loss for _, loss in at)) for at in zip(*curves, strict=True)
                ]
                line = "--" if label == "ddp" else "-"
                column.plot(*zip(*points, strict=True), label=label, linestyle=line)
                print(kind, label, *(f"{step}: {loss:.4f}" for step, loss in points), flush=True)
            column.set(title=kind, xlabel="step", ylabel="validation loss")
    columns[0].legend()
    figure.tight_layout()
    figure.savefig(file)


def compare_losses(given: argparse.Namespace) -> int:
    """Print losses and bytes; return 1 if some are not as expected."""
    found: dict[str, list[dict[str, Any]]] = {}
    wrong = []
    print("| strategy | loss | above `ddp` | bytes of a step | formula |", "|---|---|---|---|---|", sep="\n")
    with WorkerPool(size=RANKS) as pool:
        for label in dict.fromkeys(["ddp", *given.only]):
            name, options = STRATEGIES[label]
            found[label] = [
                pool.run(
                    train, given.model, name, options, given.steps, seed, world_size=RANKS, timeout=3600
                )[0]
                for seed in range(given.seeds)
            ]
            loss = statistics.mean(one["loss"] for one in found[label])
            base = statistics.mean(one["loss"] for one in found["ddp"])
            above, sent = 100 * (loss / base - 1), found[label][0]["bytes"]
            formula = FORMULAS[label](int(found[label][0]["elements"])) if label in FORMULAS else math.nan
            print(f"| `{label}` | {loss:.4f} | {above:+.2f} % | {sent:,.0f} | {formula:,.0f} |", flush=True)
            if label in FORMULAS and abs(sent / formula - 1) > 0.01:
                wrong.append(f"{label}: {sent:,.0f} bytes, the formula has {formula:,.0f}")
            if above > BARS.get(label, math.inf):
                wrong.append(f"{label}: {above:+.2f} % above ddp, at most {BARS[label]} % are expected")
    print(*(f"FAILED {each}" for each in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
