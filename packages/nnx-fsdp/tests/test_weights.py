"""User code that reads and writes weights under FSDP2 gets the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from nnx_conformance.comparing import expect_same_run
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.weight_jobs import Attached, Differentiated, Surgeon, Written, refused, train

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "a root": ("fsdp_auto", {}),
    "blocks": ("fsdp_auto", {"min_num_params": 1}),
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("strategy", "options"), ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("model", [Attached, Written, Differentiated])
def test_what_is_attached_read_and_written_counts_as_in_one_process(
    pool: WorkerPool, strategy: str, options: dict[str, Any], model: Any
) -> None:
    alone = pool.run(train, "auto", {}, model, world_size=1)[0]
    ranks = pool.run(train, strategy, options, model, world_size=2)
    expect_same_run(ranks, alone, tolerance=1e-5)


def test_a_gradient_of_each_ranks_own_samples_is_refused(pool: WorkerPool) -> None:
    errors = pool.run(refused, "fsdp_auto", {"min_num_params": 1}, Surgeon, world_size=2)
    assert all("differs between ranks" in error for error in errors)
