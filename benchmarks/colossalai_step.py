"""Step time of chunked memory in one process against a plain loop over float32 masters.

    python benchmarks/colossalai_step.py resident               nothing offloaded; bar 1.03
    python benchmarks/colossalai_step.py offloaded              masters and moments in host memory
    python benchmarks/colossalai_step.py streamed               weights as well
    python benchmarks/colossalai_step.py resident --precision bf16-mixed

Both sides train the same GPT on the same batches with torch's fused AdamW, in the same process. They take
turns over several rounds, each side first in every other round. Printed are medians and minima over all steps
of the processor time of all threads and of the time on the clock, and their ratios. Exit code 1 if the ratio
of the medians of processor time is above the bar, 2 if the weights of the two sides are not equal to the bit.

On a machine without a GPU the "device" is host memory too, so what offloading costs is its copies and
conversions; the bar is for what stays on the device.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from nnscaler_step import GPT, Lap
from torch import Tensor, nn

TIERS = {"resident": "gathered", "offloaded": "offloaded", "streamed": "streamed"}
WORKING = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on one batch and returns its loss."""


# --- the sides ------------------------------------------------------------------------------------


def ours(model: GPT, arguments: argparse.Namespace) -> tuple[Step, Callable[[], object]]:
    """The engine, driven without Lightning."""
    from nnx.backend import ParallelContext
    from nnx_colossalai.backend import ColossalAIBackend
    from nnx_colossalai.options import ColossalAIOptions

    options = ColossalAIOptions(placement_policy=TIERS[arguments.what], overlap=arguments.overlap)
    backend = ColossalAIBackend(options)
    backend.setup(ParallelContext(device=torch.device("cpu"), precision=arguments.precision))
    backend.parallelize(model, lambda: ((), {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    backend.setup_optimizers(model, [optimizer])

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with _autocast(arguments):
            loss = backend.run_step(model, model, ids, labels)
        backend.backward(model, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.detach()

    def finish() -> None:
        backend.unparallelize(model)
        backend.teardown()

    return step, finish


def theirs(model: GPT, arguments: argparse.Namespace) -> tuple[Step, Callable[[], object]]:
    """What one would write by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if arguments.precision == "32-true":
        working: nn.Module = model
    else:
        working = copy.deepcopy(model).to(WORKING[arguments.precision])
    pairs = list(zip(model.parameters(), working.parameters(), strict=True))

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with _autocast(arguments):
            loss: Tensor = working(ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if working is not model:
            for master, worker in pairs:
                assert worker.grad is not None
                master.grad, worker.grad = worker.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if working is not model:
            with torch.no_grad():
                for master, worker in pairs:
                    worker.copy_(master)
        return loss.detach()

    return step, lambda: None


def _autocast(arguments: argparse.Namespace) -> Any:
    dtype = WORKING[arguments.precision]
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)


SIDES: Mapping[str, Callable[..., tuple[Step, Callable[[], object]]]] = {"ours": ours, "theirs": theirs}


# --- the measurement ------------------------------------------------------------------------------


def main() -> int:
    """Let both sides take turns, compare the weights, print and judge."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    laps: dict[str, list[list[Lap]]] = {side: [] for side in SIDES}
    weights: dict[str, dict[str, Tensor]] = {}
    for turn in range(arguments.rounds):
        for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
            taken, weights[side] = train(SIDES[side], arguments)
            laps[side].append(taken)
    different = [
        name for name, value in weights["theirs"].items() if not torch.equal(weights["ours"][name], value)
    ]
    if different:
        print(f"The two sides do not compute the same: {', '.join(different)}", file=sys.stderr)
        return 2
    return report(laps, arguments)


def train(
    build: Callable[..., tuple[Step, Callable[[], object]]], arguments: argparse.Namespace
) -> tuple[list[Lap], dict[str, Tensor]]:
    """One short training by one side: the time of each step after warming up, and the weights."""
    torch.manual_seed(0)
    model = GPT(
        layers=arguments.layers,
        width=arguments.width,
        vocabulary=arguments.vocabulary,
        context=arguments.context,
    )
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.context + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step, finish = build(model, arguments)
    laps = []
    for index in range(arguments.warmup + arguments.steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step(ids, labels)
        if index >= arguments.warmup:
            laps.append(Lap(time.perf_counter() - wall, time.process_time() - cpu))
    finish()
    return laps, {name: value.detach().clone() for name, value in model.state_dict().items()}


def report(laps: Mapping[str, list[list[Lap]]], arguments: argparse.Namespace) -> int:
    """Print medians, minima and the ratio of each round and of all."""
    print(
        f"{arguments.what}, {arguments.precision}, overlap {arguments.overlap}: GPT of {arguments.layers} "
        f"layers, width {arguments.width}, batch {arguments.batch} x {arguments.context}, "
        f"{arguments.threads} threads, {arguments.rounds} rounds of {arguments.steps} steps a side; "
        "weights equal to the bit"
    )
    ratios = {clock: compare(laps, clock) for clock in ("cpu", "wall")}
    if arguments.what != "resident" and not arguments.bar:
        return 0
    bar = arguments.bar or 1.03
    print(f"ratio of processor time {ratios['cpu']:.3f}, bar {bar}")
    return 0 if ratios["cpu"] <= bar else 1


def compare(laps: Mapping[str, list[list[Lap]]], clock: str) -> float:
    """Print what one clock says; the ratio of the medians."""
    times = {side: [[getattr(lap, clock) for lap in turn] for turn in turns] for side, turns in laps.items()}
    medians = {side: statistics.median(chain(*turns)) * 1e3 for side, turns in times.items()}
    least = {side: min(chain(*turns)) * 1e3 for side, turns in times.items()}
    rounds = [
        statistics.median(mine) / statistics.median(other)
        for mine, other in zip(times["ours"], times["theirs"], strict=True)
    ]
    for what, values in (("median", medians), ("least", least)):
        print(
            f"{clock:5}{what:7} ms per step: ours {values['ours']:8.2f}  theirs {values['theirs']:8.2f}  "
            f"ratio {values['ours'] / values['theirs']:.3f}"
        )
    print(f"{clock:5}rounds: {' '.join(f'{one:.3f}' for one in rounds)}")
    return medians["ours"] / medians["theirs"]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(TIERS))
    parser.add_argument("--precision", choices=tuple(WORKING), default="32-true")
    parser.add_argument("--overlap", choices=("none", "exact"), default="exact")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    parser.add_argument("--steps", type=int, default=25, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--bar", type=float, default=0.0, help="the largest ratio that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
