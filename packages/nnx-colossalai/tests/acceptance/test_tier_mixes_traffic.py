"""A step moves exactly the bytes of the formula."""

from __future__ import annotations

import pytest

from jobs.colossalai_mix_jobs import Mix, bytes_moved
from jobs.colossalai_mix_model import Recipe
from nnx_colossalai.plan.schedule import work
from nnx_colossalai.plan.spec import Group, ModelSpec, Tier
from nnx_conformance.pool import WorkerPool

NUMELS = (64, 128, 64, 32)
"""Elements of the units of the model, of all ranks."""
MIXES = {
    "gathered": ("gathered",) * 4,
    "sharded": ("sharded",) * 4,
    "offloaded": ("offloaded",) * 4,
    "streamed": ("streamed",) * 4,
    "mixed": ("streamed", "offloaded", "gathered", "sharded"),
}
WIDTHS = {"32-true": 4, "bf16-mixed": 2}


def formula(tiers: tuple[str, ...], precision: str, accumulate: int, world_size: int) -> tuple[int, int]:
    """Bytes to the device and to the host, written out."""
    to_device = to_host = 0
    width = WIDTHS[precision]
    for numel, tier in zip(NUMELS, tiers, strict=True):
        part = numel // world_size
        if tier == "offloaded":
            to_device += part * width  # the refreshed weights
        elif tier == "streamed":
            to_device += 2 * accumulate * part * width  # for each forward and each backward
        if tier in ("offloaded", "streamed"):
            # Alone a rank sends each gradient as it is; several send the sum of all once, in float32.
            to_host += part * width * accumulate if world_size == 1 else part * 4
    return to_device, to_host


@pytest.mark.quick(every=21)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", list(WIDTHS))
@pytest.mark.parametrize("mix", list(MIXES))
def test_bytes_moved_in_a_step_are_those_of_the_formula(
    pool: WorkerPool, mix: str, precision: str, world_size: int
) -> None:
    for accumulate, overlap in ((1, "none"), (2, "exact")):
        recipe = Recipe(precision=precision, accumulate=accumulate)
        init = None if world_size == 1 else "gloo"
        ranks = pool.run(bytes_moved, recipe, Mix(MIXES[mix], overlap), world_size=world_size, init=init)
        wanted = formula(MIXES[mix], precision, accumulate, world_size)
        for counts in ranks:
            assert counts == [wanted] * len(counts), f"accumulate={accumulate}, overlap={overlap}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("precision", list(WIDTHS))
@pytest.mark.parametrize("mix", list(MIXES))
def test_the_planner_counts_with_the_same_formula(mix: str, precision: str, world_size: int) -> None:
    groups = tuple(
        Group(name=f"unit {number}", numel=numel, trainable=numel) for number, numel in enumerate(NUMELS)
    )
    spec = ModelSpec(groups=groups, world_size=world_size, working_bytes=WIDTHS[precision])
    works = [work(spec, group, Tier(tier)) for group, tier in zip(groups, MIXES[mix], strict=True)]
    counted = sum(one.to_device for one in works), sum(one.to_host for one in works)
    assert counted == formula(MIXES[mix], precision, 1, world_size)
