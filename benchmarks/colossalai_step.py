"""Step time of chunked memory in one process against a plain loop over float32 masters.

    python benchmarks/colossalai_step.py resident               nothing offloaded; bar 1.03
    python benchmarks/colossalai_step.py offloaded              masters and moments in host memory
    python benchmarks/colossalai_step.py streamed               weights as well
    python benchmarks/colossalai_step.py resident --precision bf16-mixed

Both sides train the same GPT on the same batch with torch's fused AdamW, in the same process and at the same
time: they take turns after every lap, each side first in every other pair of laps. A lap is a few steps and
ends when its last step is complete, so each side pays for its own optimizer in the background.
Other work on the machine affects both laps of a pair. So the median of the ratios of all pairs is stable
while the times are not; its standard error is printed. Medians and minima of the processor time
of all threads and of the wall time are printed as well. Every round starts again, with other memory.

Exit code 1 if the median of the ratios of processor time is above the bar, 2 if the weights of the two sides
are not bitwise equal.

On a machine without a GPU the "device" is host memory too, so offloading costs its copies and
conversions; the bar is for the resident case.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from nnscaler_step import GPT, Lap
from pairs import compare
from torch import Tensor, nn

TIERS = {"resident": "gathered", "offloaded": "offloaded", "streamed": "streamed"}
WORKING = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


class Side(NamedTuple):
    """One way to train.

    Attributes:
        step: Trains on one batch and returns its loss.
        wait: Returns when nothing of the steps is under way.
        finish: Takes everything down.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    wait: Callable[[], object]
    finish: Callable[[], object]


# --- the sides ------------------------------------------------------------------------------------


def ours(model: GPT, arguments: argparse.Namespace) -> Side:
    """The engine, driven without Lightning."""
    from nnx_colossalai.backend import ColossalAIBackend
    from nnx_colossalai.options import ColossalAIOptions
    from nnx_core.backend import ParallelContext

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

    return Side(step, backend._models[model].stepper.finish, finish)


def theirs(model: GPT, arguments: argparse.Namespace) -> Side:
    """Return the step as a user would write it by hand."""
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

    return Side(step, lambda: None, lambda: None)


def _autocast(arguments: argparse.Namespace) -> Any:
    dtype = WORKING[arguments.precision]
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)


SIDES: Mapping[str, Callable[[GPT, argparse.Namespace], Side]] = {"ours": ours, "theirs": theirs}


# --- the measurement ------------------------------------------------------------------------------


def main() -> int:
    """Let both sides take turns, compare the weights, print and judge."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    pairs: list[dict[str, Lap]] = []
    for _ in range(arguments.rounds):
        taken, weights = train(arguments)
        pairs += taken
        different = [
            name for name, value in weights["theirs"].items() if not torch.equal(weights["ours"][name], value)
        ]
        if different:
            print(f"The two sides do not compute the same: {', '.join(different)}", file=sys.stderr)
            return 2
    return report(pairs, arguments)


def train(arguments: argparse.Namespace) -> tuple[list[dict[str, Lap]], dict[str, dict[str, Tensor]]]:
    """One short training by both sides, lap by lap: the times of each pair of laps, and the weights."""
    models = {name: make_model(arguments) for name in SIDES}
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.context + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    sides = {name: build(models[name], arguments) for name, build in SIDES.items()}
    pairs = []
    for index in range(arguments.warmup + arguments.steps // arguments.lap):
        order = list(SIDES)[:: 1 if index % 2 == 0 else -1]
        pair = {name: timed(sides[name], ids, labels, arguments.lap) for name in order}
        if index >= arguments.warmup:
            pairs.append(pair)
    for side in sides.values():
        side.finish()
    return pairs, {name: dict(model.state_dict()) for name, model in models.items()}


def make_model(arguments: argparse.Namespace) -> GPT:
    """The model with which both sides begin."""
    torch.manual_seed(0)
    return GPT(
        layers=arguments.layers,
        width=arguments.width,
        vocabulary=arguments.vocabulary,
        context=arguments.context,
    )


def timed(side: Side, ids: Tensor, labels: Tensor, steps: int) -> Lap:
    """The times of one of its steps: wall time, and processor time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        side.step(ids, labels)
    side.wait()
    return Lap((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def report(pairs: Sequence[Mapping[str, Lap]], arguments: argparse.Namespace) -> int:
    """Print the ratios by both clocks, and judge the processor time."""
    print(
        f"{arguments.what}, {arguments.precision}, overlap {arguments.overlap}: GPT of {arguments.layers} "
        f"layers, width {arguments.width}, batch {arguments.batch} x {arguments.context}, "
        f"{arguments.threads} threads, {len(pairs)} pairs of laps of {arguments.lap} steps; "
        "weights equal to the bit"
    )
    ours, theirs = ([pair[side] for pair in pairs] for side in ("ours", "theirs"))
    ratios = {clock: compare(ours, theirs, clock) for clock in ("cpu", "wall")}
    if arguments.what != "resident" and not arguments.bar:
        return 0
    bar = arguments.bar or 1.03
    print(f"ratio of processor time {ratios['cpu']:.3f}, bar {bar}")
    return 0 if ratios["cpu"] <= bar else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(TIERS))
    parser.add_argument("--precision", choices=tuple(WORKING), default="32-true")
    parser.add_argument("--overlap", choices=("none", "exact"), default="exact")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="trainings, of both sides each")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each side in a round")
    parser.add_argument("--lap", type=int, default=2, help="steps in a lap")
    parser.add_argument("--warmup", type=int, default=2, help="laps before them that are not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--bar", type=float, default=0.0, help="the largest ratio that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
