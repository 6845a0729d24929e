"""`bagua` keeps every guarantee without a codec; the others come near the numbers, and keep the rest.

Checks that do not depend on the algorithm run under `bagua` alone. The checks train fewer steps than the
default intervals.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance
from nnx_conformance.runner import select_checks

NEAR = ("converges", "accumulation", "overflow_on_one_rank", "ranks_start_with_equal_weights")
ONE_STEP = ("resume_and_save_again", "killed_while_saving")
"""Checks that train one step: an interval of two steps is refused there."""
UNSHARDED = ("shards_parameters", "shards_gradients", "shards_optimizer")
ODD = ("resume_at_world_sizes", "data_position_resumes")
"""Checks that two nodes of one rank fail: nothing is sharded there, and three ranks are no two nodes."""
LONGER = tuple(
    check.name for check in select_checks((*NEAR, "stages", "checkpoints")) if check.name not in ONE_STEP
)


@pytest.mark.quick(
    checks=(
        *(
            "losses_float32",
            "accumulation",
            "clip_after_unscaling",
            "overflow_on_one_rank",
            "manual_clipping",
        ),
        *("loss_falls_as_in_one_process", "parameters_used_sometimes"),
    ),
)
class TestBagua(StrategyConformance):
    strategy = "bagua"


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestByteGrad(StrategyConformance):
    strategy = "bagua_bytegrad"
    only = (*NEAR, "numbers", "checkpoints")


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestPowerSGD(StrategyConformance):
    strategy = "powersgd"
    options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}  # noqa: RUF012
    only = NEAR


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestHybridCompressed(StrategyConformance):
    """Two nodes of one rank each."""

    strategy = "fsdp_hybrid_compressed"
    options = {"replicate_size": 2, "min_num_params": 100}  # noqa: RUF012
    only = tuple(
        check.name
        for check in select_checks((*NEAR, "numbers", "stages", "checkpoints"))
        if check.name not in UNSHARDED + ODD
    )


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestLocalSGD(StrategyConformance):
    strategy = "localsgd"
    options = {"interval": 1, "replicas": "each"}  # noqa: RUF012
    only = (*NEAR, "stages", "checkpoints")


@pytest.mark.full
class TestShiftOne(StrategyConformance):
    strategy = "bagua_decentralized"
    options = {"peer_selection_mode": "shift_one", "replicas": "each"}  # noqa: RUF012
    only = (*NEAR, "checkpoints")


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestLowPrecision(StrategyConformance):
    strategy = "bagua_low_precision_decentralized"
    options = {"replicas": "each"}  # noqa: RUF012
    only = (*NEAR, "stages", "checkpoints")


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestAsync(StrategyConformance):
    strategy = "bagua_async"
    options = {"interval": 1, "staleness": 1, "replicas": "each"}  # noqa: RUF012
    only = LONGER


@pytest.mark.full
class TestStreamingDiLoCo(StrategyConformance):
    strategy = "diloco_streaming"
    options = {"interval": 2, "fragments": 2, "replicas": "each"}  # noqa: RUF012
    only = LONGER


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestDiLoCo(StrategyConformance):
    strategy = "diloco"
    options = {"interval": 2}  # noqa: RUF012
    only = NEAR
