"""The number of times that a step makes the host wait for a card, for every engine."""

from __future__ import annotations

import pytest

from jobs.host_read_jobs import count
from nnx_conformance.pool import WorkerPool

USED = "nnx_core/parameter_usage.answer: tolist"
"""The parameters that some rank used. The read comes from host memory, and waits for other hosts only."""

OVERFLOW = "nnx_core/gradients.step: item"
"""The decision to step or not, which torch's scaler reads too."""

OF_ENGINE = {
    "fsdp": {USED: 1},
    "colossalai": {USED: 1, "nnx_colossalai/loss_scale.update: tolist": 1},
    "nnscaler_zero": {USED: 1},
    "nnscaler_dp": {  # of what this rank did not use, for all of a bucket at once
        "nnx_nnscaler/buckets.used_elsewhere: cpu": 1,
        "nnx_nnscaler/buckets.used_elsewhere: tolist": 1,
    },
    "nnscaler": {},
    # One compares the order of gradients, in a run's first steps only; one finds gradients that a step wrote.
    "nnx_deepspeed": {USED: 3},
    "fairscale_fsdp": {USED: 1},
    "fairscale": {USED: 2},  # one of them is for gradients that the owner's step has dropped or written
}

STRATEGIES = [
    *("fsdp_auto", "fsdp_hybrid", "fsdp_offload"),
    *("colossalai", "colossalai_cpu", "nnscaler"),
    *("nnscaler_zero", "nnscaler_dp", "nnscaler_tp"),
    *("nnx_deepspeed_2", "nnx_deepspeed_1", "nnx_deepspeed_3"),
    *("fairscale_oss", "fairscale_fsdp", "fairscale_sharded"),
]


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_reads_no_more_from_the_card_than_is_written_here(pool: WorkerPool, strategy: str) -> None:
    engine = next(engine for engine in OF_ENGINE if strategy.startswith(engine))
    for found in pool.run(count, strategy, True, world_size=2):
        assert found == {OVERFLOW: 1, **OF_ENGINE[engine]}
