"""What ranks agree on in a step: the parameters that were used, and the order of collectives."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_core.used import CollectiveOrder, used_anywhere


def agree_on_use() -> list[bool]:
    """Each rank uses one parameter, and nobody the last."""
    return used_anywhere([index == dist.get_rank() for index in range(3)])


def test_what_one_rank_used_is_used(pool: WorkerPool) -> None:
    assert pool.run(agree_on_use, world_size=2, init="gloo") == [[True, True, False]] * 2


def count_questions(turns: int) -> list[int]:
    """How many questions each step takes; every `turns`-th leaves a layer out, on all ranks."""
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
            else:
                time.sleep(9)
                order.arrive("the gather of a")
                raise RuntimeError("Connection closed by peer")
    except UnsupportedError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.parametrize(
    ("other", "seen"),
    [
        ("third", "rank 0 came to the gather of c"),
        ("waits", "rank 0 waits in barrier, called in deviate"),
        ("slow", "rank 0 did not come to it within 6 s"),
    ],
)
def test_ranks_that_part_get_one_error_that_names_the_layers(pool: WorkerPool, other: str, seen: str) -> None:
    for message, seconds in pool.run(deviate, other, world_size=2, init="gloo"):
        assert "rank 1 came to the gather of b" in message
        assert seen in message
        assert message.endswith("Call every expert.")
        assert seconds < 20


def test_one_process_has_nobody_to_ask() -> None:
    order = CollectiveOrder(remedy="")
    with order.reporting():
        order.begin("training_step")
        order.arrive("anything")
        order.end()
    assert order.questions == 0
    assert used_anywhere([True, False]) == [True, False]


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
