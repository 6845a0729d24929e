"""The order of collectives that ranks agree on in a step, and the errors of a rank that leaves it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from nnx_conformance.pool import WorkerPool
from nnx_core.agree.announced_waits import announced, wait_for_collective
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.errors import UnsupportedError


def count_questions(turns: int) -> list[int]:
    """Return the number of questions of each step; every `turns`-th step skips a layer, on all ranks."""
    order = CollectiveOrder(remedy="")
    asked = []
    for step in range(24):
        before = order.questions
        order.begin("training_step")
        for layer in range(4):
            if step % turns or layer != 2:
                order.arrive(f"the gather of {layer}")
        order.end()
        asked.append(order.questions - before)
    return asked


def test_steps_that_are_alike_ask_nothing(pool: WorkerPool) -> None:
    for asked in pool.run(count_questions, 100, world_size=2, init="gloo"):
        assert asked[0] > 4
        assert asked[10:] == [0] * 14
    for asked in pool.run(count_questions, 12, world_size=2, init="gloo"):
        assert asked[12] > 0  # all ranks leave the layer out, which they have to find out
        assert asked[14:] == [0] * 10


def deviate(other: str) -> tuple[str, float]:
    """Rank 1 comes to another layer; rank 0 to a third one, or waits in a gather, or takes its time."""
    order = CollectiveOrder(remedy="Call every expert.", wait=6.0 if other == "slow" else 60.0)
    for _ in range(3):
        order.begin("training_step")
        order.arrive("the gather of a")
        order.end()
    order.begin("training_step")
    began = time.monotonic()
    try:
        with order.reporting():
            if dist.get_rank() == 1:
                order.arrive("the gather of b")
            elif other == "third":
                order.arrive("the gather of c")
            elif other == "waits":
                order.arrive("the gather of a")
                dist.barrier()  # until rank 1 is gone
            elif other == "waits announced":
                order.arrive("the gather of a")
                work = dist.all_reduce(torch.zeros(1), async_op=True)
                wait_for_collective(work, "the gather of a")
            else:
                time.sleep(9)
                order.arrive("the gather of a")
                raise RuntimeError("Connection closed by peer")
    except UnsupportedError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("other", "seen"),
    [
        ("third", "rank 0 came to the gather of c"),
        ("waits", "rank 0 waits in barrier, called in deviate"),
        ("waits announced", "rank 0 waits for the gather of a"),
        ("slow", "rank 0 did not come to it within 6 s"),
    ],
)
def test_ranks_that_part_get_one_error_that_names_the_layers(pool: WorkerPool, other: str, seen: str) -> None:
    for message, seconds in pool.run(deviate, other, world_size=2, init="gloo"):
        assert "rank 1 came to the gather of b" in message
        assert seen in message
        assert message.endswith("Call every expert.")
        assert seconds < 20


def make_progress() -> str:
    """Rank 0 waits for longer than a rank may be stuck, but never long for one thing; then the ranks meet."""
    order = CollectiveOrder(remedy="")
    order.begin("training_step")
    if dist.get_rank() == 0:
        for _ in range(20):
            with announced("waits for a message"):
                time.sleep(0.2)
    order.arrive("the gather of a")
    order.close(together=True)  # the store ends with rank 0
    return "met"


@pytest.mark.full
def test_many_short_waits_are_progress(pool: WorkerPool) -> None:
    assert pool.run(make_progress, world_size=2, init="gloo") == ["met", "met"]


def test_one_process_has_nobody_to_ask() -> None:
    order = CollectiveOrder(remedy="")
    with order.reporting():
        order.begin("training_step")
        order.arrive("anything")
        order.end()
    assert order.questions == 0


def leave(late: int) -> tuple[float, float]:
    """Leave together, one rank later than the other; returns when this rank began and ended to."""
    order = CollectiveOrder(remedy="")
    order.open()
    order.arrive("the end of training")
    if dist.get_rank() == late:
        time.sleep(1.0)
    began = time.time()
    order.close(together=True)
    return began, time.time()


def test_the_rank_that_keeps_the_store_leaves_last(pool: WorkerPool) -> None:
    (_, left_0), (began_1, _) = pool.run(leave, 1, world_size=2, init="gloo")
    assert left_0 >= began_1
    (_, left_0), (_, left_1) = pool.run(leave, 0, world_size=2, init="gloo")
    assert left_1 <= left_0
