"""The checks that every strategy passes, also one whose numbers only come near those of one process."""

from __future__ import annotations

from torch import equal

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import abbreviated
from nnx_conformance.task import Task

STEPS = 40
EXCESS = 1.1
"""The largest mean loss of the last epoch, as a multiple of that of one process."""


@check()
def loss_falls_as_in_one_process(bench: Bench) -> None:
    """After five epochs the loss is at most 10 % above one process, and all ranks have equal weights."""
    task = Task(steps=STEPS)
    wanted = _last(bench.train_alone(task).losses)
    for world_size in bench.world_sizes:
        ranks = bench.train(task, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            found = _last(outcome.losses)
            expect(
                found <= EXCESS * wanted,  # also False for NaN
                f"rank {rank} of {world_size}: the mean loss of the last epoch is {found:.4g}, one process "
                f"has {wanted:.4g}; at most {EXCESS} times are allowed.",
            )
            differing = [
                name for name, one in ranks[0].weights.items() if not equal(one, outcome.weights[name])
            ]
            expect(not differing, f"rank {rank} of {world_size} ends with another {abbreviated(differing)}.")


def _last(losses: list[float]) -> float:
    epoch = losses[-Task().batches :]
    return sum(epoch) / len(epoch)
