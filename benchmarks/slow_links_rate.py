"""Steps over a link of limited rate between two nodes: payload, bytes on the link, and seconds.

`slow_links.py` calls `compare_rate`. The nodes are namespaces of this machine (`tests/nodes/laboratory.py`;
needs root and iproute2), each with one process. `auto` on both nodes at once gives the seconds of
computation, and with those of `ddp` the ratio r of communication to computation. With b, the bytes over those
of `ddp`, the expected speed-up over `ddp` is (1 + r) / (1 + r x b).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from nodes.laboratory import Laboratory, why_not  # noqa: E402

WIDTH, LAYERS = 1024, 2
ELEMENTS = LAYERS * (WIDTH * WIDTH + WIDTH)
FIRST, STEPS = 20, 40
"""Steps before the measured ones, and these: two intervals."""
PAYLOAD, INTERFACE, SPEED = 0.01, 0.08, 0.85
"""The largest relative differences from the formula in bytes, and the least share of its speed-up."""


def compare_rate(
    rate: str,
    labels: Sequence[str],
    formulas: Mapping[str, Callable[[int], float]],
    strategies: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    batch: int,
) -> int:
    """Print a row for each strategy; return 1 if one is not as the formula says.

    Args:
        rate: The rate of both nodes' links, as ``tc`` takes it.
        labels: The strategies.
        formulas: The bytes of a step for so many elements, by label.
        strategies: Names and options, by label.
        batch: The samples of a rank in a step; fewer take less time to compute, so that r is larger.
    """
    if why_not():
        raise SystemExit(f"no laboratory here: {why_not()}")
    alone, _, _ = _measure(rate, "auto", {}, batch)
    ddp, on_link, _ = _measure(rate, "ddp", {}, batch)
    r, wrong = (ddp - alone) / alone, []
    print(f"{rate}, {ELEMENTS:,} elements: {alone:.4f} s alone, {ddp:.4f} s under ddp, r = {r:.1f}")
    print(
        "| strategy | payload | formula | on the link | samples/s | speed-up | formula |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    print(f"| `ddp` | | {4 * ELEMENTS:,} | {on_link:,.0f} | {2 * batch / ddp:.1f} | 1.00 | 1.00 |")
    for label in labels:
        seconds, on_link, payload = _measure(rate, *strategies[label], batch)
        formula = formulas[label](ELEMENTS)
        gain, expected = ddp / seconds, (1 + r) / (1 + r * formula / (4 * ELEMENTS))
        print(
            f"| `{label}` | {payload:,.0f} | {formula:,.0f} | {on_link:,.0f} | {2 * batch / seconds:.1f} "
            f"| {gain:.2f} | {expected:.2f} |",
            flush=True,
        )
        checks = {
            "payload": abs(payload / formula - 1) <= PAYLOAD,
            "bytes on the link": on_link / formula - 1 <= INTERFACE,
            "speed-up": gain >= SPEED * expected,
        }
        wrong += [f"{label}: {name}" for name, holds in checks.items() if not holds]
    print(*(f"FAILED {each}" for each in wrong), sep="\n")
    return int(bool(wrong))


def _measure(rate: str, name: str, options: dict[str, Any], batch: int) -> tuple[float, float, float]:
    """Return the mean seconds of a step, and the bytes on node 0's link and of its payload."""
    nodes = 1 if name == "auto" else 2
    path = os.pathsep.join([str(ROOT / "tests" / "startup"), os.environ.get("PYTHONPATH", "")])
    with (
        tempfile.TemporaryDirectory() as top,
        Laboratory(2, folder=Path(top) / "lab", rate=rate) as lab,
    ):
        runs = [
            node.start(
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
                *("--master-addr", node.name if name == "auto" else "node0", "--master-port=29500"),
                f"--node-rank={0 if name == 'auto' else node.number}",
                *(str(Path(__file__).resolve()), json.dumps([name, options, nodes, batch])),
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            )
            for node in lab.nodes
        ]
        for run in runs:
            ended = run.wait(900)
            if ended.code:
                raise SystemExit(f"{name} ended with {ended.code}:\n{ended.output[-2000:]}")
        (line,) = (each for each in runs[0].output.splitlines() if each.startswith("MEASURED "))
    seconds, on_link, payload = map(float, line.split()[1:])
    return seconds, on_link, payload


def _train(name: str, options: dict[str, Any], nodes: int, batch: int) -> None:
    """Train on this node, and print what the steps took."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, nn

    import nnx
    from nnx_comm import QAdam

    class Clock(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step in (FIRST, FIRST + STEPS):
                sent = getattr(getattr(trainer.strategy, "backend", None), "total", 0)
                seen.append((time.monotonic(), _sent(), sent))

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.layers(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            if name == "bagua_qadam":
                return QAdam(self.parameters(), warmup_steps=FIRST // 2)
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            samples = torch.randn(nodes * batch * (FIRST + STEPS), WIDTH)
            return torch.utils.data.DataLoader(samples, batch_size=batch)

    seen: list[tuple[float, int, int]] = []
    strategy = name if name == "auto" else nnx.strategy(name, **options)
    Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=nodes, max_steps=FIRST + STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Clock()],
    ).fit(Model())  # fmt: skip
    first, last = seen
    print("MEASURED", *((after - before) / STEPS for before, after in zip(first, last, strict=True)))


def _sent() -> int:
    """Return the bytes that this node has sent over its link."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])


if __name__ == "__main__":
    _train(*json.loads(sys.argv[1]))
