"""Every ZeRO stage resumes the checkpoints of any other strategy, and vice versa, bit for bit.

The cases marked `full` are the other pairs: every stage and strategy at every world size.
"""

from __future__ import annotations

import pytest

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.engine_resume_jobs import linear_after
from nnx_test_helpers.resuming import Cell, Resuming, cases, check_that_all_meet, pairs
from nnx_test_helpers.training import Run

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

STAGES = ("nnx_deepspeed_1", "nnx_deepspeed_2", "nnx_deepspeed_3", "nnx_deepspeed_3_cpu")
OTHERS = ("fsdp_auto", "ddp", "nnscaler_deduped", "colossalai")
SIZES = (1, 2)
CASES = cases(STAGES, OTHERS, SIZES)


@pytest.fixture(scope="module")
def resuming(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Resuming:
    return Resuming(pool, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.quick(every=30)
@pytest.mark.parametrize(("source", "target"), CASES, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_a_stage_resumes_exactly_what_was_saved(resuming: Resuming, source: Cell, target: Cell) -> None:
    resuming.check(source, target)


def test_every_stage_and_every_strategy_meet_both_ways_at_every_world_size() -> None:
    check_that_all_meet(pairs(STAGES, OTHERS, SIZES), STAGES, OTHERS, SIZES)


def test_stage_3_gives_torch_its_own_linear_back(pool: WorkerPool) -> None:
    """Left in some ranks' processes, DeepSpeed's made a later strategy's collectives go in another order."""
    run = Run(strategy="nnx_deepspeed_3", devices=1, steps=2)
    for is_its_own, losses in (pool.run(linear_after, run, world_size=1)[0] for _ in range(2)):
        assert is_its_own
        assert len(losses) == run.steps
