"""Every model has the losses of one process under every policy.

Every policy runs with every model on 2 and on 4 processes, by default in rotation. Batch statistics and
dropout, which replicas compute separately, are compared with Lightning's ddp.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jobs.nnscaler_models import MODELS, Case, losses_of
from nnx_conformance.pool import WorkerPool

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("nnscaler_dp", {}),
    "zero": ("nnscaler_zero", {}),
    "tp": ("nnscaler_tp", {}),
    "data": ("nnscaler", {"policy": "data"}),
    "autodist": ("nnscaler_deduped", {}),
    "pp": ("nnscaler_pp", {}),
    "looped": ("nnscaler_pp", {}),
    "hybrid": ("nnscaler_hybrid", {}),
}
REPLICATED = ("dp", "zero")
TOO_SHORT = {("mlp", "looped")}
"""Models with fewer layers than the eight stages of this policy on four processes."""
OF_EACH_REPLICA = ("cnn", "gpt")
"""Models whose replicas compute different results from one process on the whole batch."""
Losses = tuple[list[float], list[float]]


class References:
    """The results of one process and of ddp, computed once for each model."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.of = lru_cache(maxsize=None)(self._of)

    def _of(self, model: str, strategy: str, devices: int) -> Losses:
        case = Case(model, strategy, devices=devices)
        return self.pool.run(losses_of, case, world_size=devices)[0]


@pytest.fixture(scope="module")
def references(pool: WorkerPool) -> References:
    return References(pool)


def check(
    pool: WorkerPool, references: References, model: str, policy: str, devices: int, **options: Any
) -> None:
    strategy, own = POLICIES[policy]
    if policy == "looped":
        own = {"pipeline_nstages": 2 * devices}  # each rank has two
    case = Case(model, strategy, {**own, **options}, devices)
    replicas = model in OF_EACH_REPLICA and policy in REPLICATED
    expected = references.of(model, "ddp", devices) if replicas else references.of(model, "auto", 1)
    for losses, validated in pool.run(losses_of, case, world_size=devices):
        assert len(losses) == case.steps
        assert losses == pytest.approx(expected[0], abs=1e-5, rel=0)
        assert validated == pytest.approx(expected[1], abs=1e-5, rel=0)


@pytest.mark.quick(every=92)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_have_the_losses_of_one(
    pool: WorkerPool, references: References, tmp_path: Path, model: str, policy: str
) -> None:
    check(pool, references, model, policy, 2, gen_savedir=str(tmp_path))


@pytest.mark.quick(every=92)
@pytest.mark.parametrize(
    ("model", "policy"), [case for case in product(MODELS, POLICIES) if case not in TOO_SHORT]
)
def test_four_processes_have_the_losses_of_one(
    pool: WorkerPool, references: References, tmp_path: Path, model: str, policy: str
) -> None:
    check(pool, references, model, policy, 4, gen_savedir=str(tmp_path))


@pytest.mark.full  # `test_zero.py` and `test_pipelines.py` replicate units
@pytest.mark.parametrize("use_zero", [False, True])
@pytest.mark.parametrize("policy", ["tp", "data", "autodist", "pp"])
def test_units_of_two_are_replicated_over_four(
    pool: WorkerPool, references: References, tmp_path: Path, policy: str, use_zero: bool
) -> None:
    options = {"plan_ngpus": 2, "use_zero": use_zero, "gen_savedir": str(tmp_path)}
    check(pool, references, "plain_gpt", policy, 4, **options)


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("model", MODELS)
def test_dp_is_bit_equal_to_ddp(pool: WorkerPool, references: References, model: str) -> None:
    case = Case(model, "nnscaler_dp", devices=2)
    expected = references.of(model, "ddp", 2)
    assert pool.run(losses_of, case, world_size=2) == [expected] * 2
