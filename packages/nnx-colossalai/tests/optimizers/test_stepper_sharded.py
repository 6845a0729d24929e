"""The stepper over sharded masters, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.colossalai_sharded_steps import OPTIMIZERS, train, train_alone
from nnx_conformance.pool import WorkerPool

pytestmark = pytest.mark.timeout(120)


Ranks = list[dict[str, dict[str, Any]]]

_UNKNOWN_TO_DTENSORS = ("sgd", "sgd_momentum", "adagrad", "rprop")  # by kernels that torch lacks

_FUSED_ONLY_HERE = ("adamw_default",)


def run() -> dict[str, dict[str, Any]]:
    """Every optimizer in every way, in one job."""
    trained: dict[str, dict[str, Any]] = {}
    for name in OPTIMIZERS:
        trained[name] = {overlap: train(name, overlap) for overlap in ("none", "exact")}
        trained[name]["local"] = train_alone(name, local=True)
        if name not in _UNKNOWN_TO_DTENSORS:
            trained[name]["itself"] = train_alone(name, local=False)
    return trained


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> Ranks:
    trained: Ranks = pool.run(run, world_size=2, init="gloo")
    return trained


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_masters_get_the_bits_of_the_optimizers_own_step(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        trained = rank[name]
        assert (trained["none"]["in_background"], trained["exact"]["in_background"]) == (False, True)
        for key in ("values", "state"):
            assert trained["exact"][key] == trained["none"][key]
            if "itself" in trained and name not in _FUSED_ONLY_HERE:
                assert trained["none"][key] == trained["itself"][key]
        if name not in _FUSED_ONLY_HERE:
            own = [(values, dtype) for _, values, dtype in trained["local"]["values"]]
            assert [(values, dtype) for _, values, dtype in trained["none"]["values"]] == own


def test_state_is_sharded_as_its_parameter_is(ranks: Ranks) -> None:
    for rank in ranks:
        trained = rank["adamw"]["exact"]
        for index, (layout, _, _) in enumerate(trained["values"]):
            entries = trained["state"][0][index]
            assert entries["exp_avg"][0] == entries["exp_avg_sq"][0] == layout
            assert "Shard" in layout
            assert entries["step"][0] == "'plain'"
