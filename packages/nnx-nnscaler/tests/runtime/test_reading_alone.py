"""A weight or a gradient that only some of its ranks read is refused at once, or read right."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jobs.nnscaler_reading_jobs import Reading, read
from nnx_conformance.pool import WorkerPool


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [
        ("nnscaler_tp", "weight", "before the forward"),
        ("nnscaler_tp", "gradient", "before the optimizer"),
        ("nnscaler_zero", "weight", "between steps"),
        ("nnscaler_zero", "gradient", "before the optimizer"),
    ],
)
def test_what_one_rank_reads_alone_is_refused_by_name(
    pool: WorkerPool, strategy: str, what: str, when: str
) -> None:
    reading = Reading([0], what, when)
    for seen in pool.run(read, strategy, {}, reading, world_size=2, end_after=3):
        assert "rank 0 came to the gather of" in seen.error
        assert "head.weight" in seen.error
        assert re.search("rank 1 (waits|came to|is about to) ", seen.error)  # and not: it did not come
        assert "did not come to it within" not in seen.error
        assert "on every rank, even if only one rank prints them" in seen.error


def test_what_zero_holds_whole_one_rank_may_read_alone(pool: WorkerPool) -> None:
    reading = Reading([0], "weight", "after the forward")
    alone = pool.run(read, "auto", {}, reading, world_size=1)[0]
    first, second = pool.run(read, "nnscaler_zero", {}, reading, world_size=2)
    assert first.losses == second.losses == pytest.approx(alone.losses, abs=1e-5)
    assert first.norms == pytest.approx(alone.norms, abs=1e-5)


TWO_UNITS: dict[str, Any] = {"plan_ngpus": 2}


@pytest.mark.full
def test_a_unit_may_read_what_the_other_does_not(pool: WorkerPool) -> None:
    reading = Reading([0, 1], "weight", "before the forward")
    alone = pool.run(read, "auto", {}, reading, world_size=1)[0]
    for rank, seen in enumerate(pool.run(read, "nnscaler_tp", TWO_UNITS, reading, world_size=4)):
        assert not seen.error
        assert seen.losses == pytest.approx(alone.losses, abs=1e-5)
        assert seen.norms == pytest.approx(alone.norms if rank < 2 else [], abs=1e-5)


@pytest.mark.full  # it waits for a limit of twenty seconds
def test_a_rank_that_reads_what_its_unit_does_not_ends_the_run_of_all_units(pool: WorkerPool) -> None:
    reading = Reading([2], "weight", "before the forward")
    for seen in pool.run(read, "nnscaler_tp", TWO_UNITS, reading, world_size=4, end_after=3):
        assert "rank 2 came to the gather of head.weight" in seen.error
        assert re.search("rank 3 (waits|came to) ", seen.error)
        assert "did not come to it within" not in seen.error
