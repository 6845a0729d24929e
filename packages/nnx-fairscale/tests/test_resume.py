"""Every fairscale strategy resumes the checkpoints of any other strategy, and vice versa, bit for bit.

The cases marked `full` are the other pairs: every strategy at every world size.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.resuming import Cell, Resuming, cases, check_that_all_meet, pairs

pytest.importorskip("fairscale", reason="fairscale is not installed")

OURS = ("fairscale_fsdp", "fairscale_oss", "fairscale_sharded")
STAGES = ("nnx_deepspeed_2", "nnx_deepspeed_3") if find_spec("deepspeed") else ()
OTHERS = ("fsdp_auto", "ddp", "nnscaler_deduped", "colossalai", *STAGES)
SIZES = (1, 2, 3)
CASES = cases(OURS, OTHERS, SIZES)


@pytest.fixture(scope="module")
def resuming(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Resuming:
    return Resuming(pool, tmp_path_factory.mktemp("fairscale"))


@pytest.mark.quick(every=36)
@pytest.mark.parametrize(("source", "target"), CASES, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_a_strategy_resumes_exactly_what_was_saved(resuming: Resuming, source: Cell, target: Cell) -> None:
    resuming.check(source, target)


def test_every_two_strategies_meet_both_ways_at_every_world_size() -> None:
    check_that_all_meet(pairs(OURS, OTHERS, SIZES), OURS, OTHERS, SIZES)
