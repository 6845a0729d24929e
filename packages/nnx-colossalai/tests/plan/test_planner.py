"""The plan is within the memory limits, near the fastest and equal on all ranks, or refused with a reason."""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from jobs.colossalai_recount import HUGE, layers, llama, random_resources, random_spec, recount, tiers_of
from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.planner import downgrade, evaluate, plan, why_not_lower
from nnx_colossalai.plan.policies import candidates
from nnx_colossalai.plan.schedule import TimeModel
from nnx_colossalai.plan.spec import Constraints, Placement, RankResources, Tier, allowed_tiers
from nnx_core.errors import PlanError


def everything(spec):
    """Every placement that there is, with its memory and time."""
    return itertools.product(
        *allowed_tiers(Constraints(), [g.name for g in spec.groups], spec.world_size).values()
    )


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("block", range(10))
def test_200_random_models_never_exceed_their_budgets_and_are_refused_only_where_nothing_fits(block):
    fitted = 0
    for seed in range(20 * block, 20 * block + 20):
        spec = random_spec(seed, most=5)
        resources = random_resources(seed, spec)
        try:
            planned = plan(spec, resources)
        except PlanError:
            for choice in everything(spec):
                device, host = recount(spec, choice)
                assert device > resources.device_bytes or host > resources.host_bytes, (seed, choice)
            continue
        fitted += 1
        device, host = recount(spec, tiers_of(planned))
        assert device <= resources.device_bytes and host <= resources.host_bytes, seed
        assert (planned.memory.device, planned.memory.host) == (device, host), seed
    assert 4 <= fitted <= 20


def fastest(spec, resources, choices):
    memory, timing = MemoryModel(spec), TimeModel(spec, resources, overlapped=True)
    return min(
        (
            timing.seconds(one)
            for one in choices
            if memory.device_peak(one) <= resources.device_bytes
            and memory.host_peak(one) <= resources.host_bytes
        ),
        default=None,
    )


@pytest.mark.quick(every=3, first=1)
@pytest.mark.parametrize("block", range(3))
def test_the_search_is_within_a_few_percent_of_trying_all_placements(block):
    for seed in range(10 * block, 10 * block + 10):
        spec = random_spec(1000 + seed, most=5)
        resources = random_resources(seed, spec)
        best = fastest(spec, resources, everything(spec))
        memory, timing = MemoryModel(spec), TimeModel(spec, resources, overlapped=True)
        found = fastest(spec, resources, candidates(spec, memory, timing, Constraints(), exact=False))
        assert (best is None) == (found is None), seed
        if best:
            assert found <= best * 1.05, seed
            assert plan(spec, resources).seconds <= best * (1 + 1e-8), seed


@pytest.mark.quick(every=9, first=2)
@pytest.mark.parametrize("seed", range(10))
def test_more_memory_is_never_slower(seed):
    spec = random_spec(seed, most=8)
    resources = random_resources(seed, spec)
    for budget in ("device_bytes", "host_bytes"):
        before = None
        for factor in (0.8, 1.0, 1.1, 1.3, 2.0):
            try:
                seconds = plan(
                    spec, replace(resources, **{budget: int(getattr(resources, budget) * factor)})
                ).seconds
            except PlanError:
                assert before is None, (seed, budget, factor)
                continue
            assert before is None or seconds <= before * (1 + 1e-8), (seed, budget, factor)
            before = seconds


def test_everything_stays_on_the_device_where_it_fits():
    planned = plan(layers(6), RankResources(device_bytes=HUGE, host_bytes=HUGE))
    assert set(tiers_of(planned)) == {Tier.GATHERED}
    assert planned.busy["to_device"] == planned.busy["host"] == 0


def test_above_one_rank_weights_are_sharded_where_complete_ones_do_not_fit():
    spec = layers(8, world_size=4)
    least, most = (MemoryModel(spec).device_peak([tier] * 8) for tier in (Tier.SHARDED, Tier.GATHERED))
    planned = plan(spec, RankResources(device_bytes=(least + most) // 2, host_bytes=0))
    assert set(tiers_of(planned)) == {Tier.GATHERED, Tier.SHARDED}


def test_a_plan_is_the_same_whatever_the_seed_of_hashes_and_needs_no_torch():
    source = (
        "import sys; from jobs.colossalai_recount import *; from nnx_colossalai.plan.planner import plan\n"
        "from dataclasses import replace\n"
        "spec = random_spec(3, most=14); resources = replace(random_resources(3, spec), host_bytes=10**9)\n"
        "print(plan(spec, resources)); print('torch' in sys.modules)"
    )
    printed = set()
    for seed in ("1", "2"):
        path = os.pathsep.join(sys.path)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "NNX_AUTOLOAD": "0"}
        printed.add(
            subprocess.run(
                [sys.executable, "-c", source],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
        )
    (only,) = printed
    assert only.startswith("Planned(") and only.endswith("False\n")


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("world_size", [1, 8])
def test_a_model_of_7_billion_parameters_is_planned_in_seconds(world_size):
    begin = time.process_time()
    planned = plan(llama(world_size), RankResources(device_bytes=24 * 2**30, host_bytes=128 * 2**30))
    assert time.process_time() - begin < 10
    assert planned.memory.device <= 24 * 2**30
    assert planned.memory.device >= 23 * 2**30 or world_size > 1


@pytest.mark.full
def test_200_groups_are_planned_in_seconds():
    begin = time.process_time()
    spec = layers(200)
    planned = plan(spec, RankResources(device_bytes=2_000_000, host_bytes=HUGE))
    assert time.process_time() - begin < 20
    assert planned.memory.device <= 2_000_000


# ---------------------------------------------------------------- why, and what next


def test_every_group_says_why_it_is_not_higher():
    resources = RankResources(device_bytes=50_000, host_bytes=HUGE)
    planned = plan(layers(4), resources)
    assert set(planned.reasons) == {f"layers.{at}" for at in range(4)}
    tiers = planned.placement.tiers
    for name, reason in planned.reasons.items():
        if tiers[name] is Tier.GATHERED:
            assert reason == "fits"
        else:
            assert "would need" in reason and "48.83 KiB (50000 bytes) are allowed" in reason


def test_a_placement_made_by_hand_is_told_its_cost_though_it_does_not_fit():
    placement = Placement({"layers.0": Tier.GATHERED, "layers.1": Tier.OFFLOADED})
    told = evaluate(layers(2), RankResources(device_bytes=1, host_bytes=1), placement)
    assert told.placement == placement and told.memory.device > 1


@pytest.mark.quick(every=3, first=1)
@pytest.mark.parametrize("seed", range(10))
def test_a_downgrade_needs_less_of_the_device_and_only_moves_groups_down(seed):
    spec = random_spec(seed, most=8)
    resources = replace(random_resources(seed, spec), device_bytes=HUGE, host_bytes=HUGE)
    planned, steps = plan(spec, resources), 0
    while lower := downgrade(planned, spec, resources):
        assert lower.memory.device < planned.memory.device
        moves = zip(tiers_of(planned), tiers_of(lower), strict=True)
        assert all(list(Tier).index(before) <= list(Tier).index(now) for before, now in moves)
        planned, steps = lower, steps + 1
        assert steps <= 3 * len(spec.groups)
    least = MemoryModel(spec).device_peak([Tier.STREAMED] * len(spec.groups))
    assert planned.memory.device <= least
    assert "no group has a lower tier that needs less" in str(why_not_lower(planned, spec, resources))


def test_a_downgrade_saves_the_bytes_that_are_missing():
    spec, resources = layers(8), RankResources(device_bytes=HUGE, host_bytes=HUGE)
    planned = plan(spec, resources)
    for missing in (1, 16_000, 50_000, 100_000):
        lower = downgrade(planned, spec, resources, missing=missing)
        assert planned.memory.device - lower.memory.device >= missing
    assert downgrade(planned, spec, resources, missing=10**6) is None


def test_a_downgrade_that_the_host_has_no_room_for_names_what_it_needs():
    spec, resources = layers(4), RankResources(device_bytes=HUGE, host_bytes=10_000)
    planned = plan(spec, resources)
    assert downgrade(planned, spec, resources) is None
    error = why_not_lower(planned, spec, resources)
    assert (
        "the next needs 19.53 KiB (20000 bytes) of host memory, 9.77 KiB (10000 bytes) are allowed."
        in error.message
    )
    assert error.remedy == "Raise host_memory, or use more ranks."


def test_a_downgrade_keeps_to_the_constraints_and_names_them_where_they_leave_nothing():
    spec, resources, constraints = (
        layers(4),
        RankResources(device_bytes=HUGE, host_bytes=HUGE),
        Constraints(policy="cuda"),
    )
    planned = plan(spec, resources, constraints)
    assert downgrade(planned, spec, resources, constraints) is None
    error = why_not_lower(planned, spec, resources, constraints)
    assert "none keeps to policy='cuda'." in error.message
    assert error.remedy == "Leave that out, or use activation checkpointing or a smaller batch."


def test_a_downgrade_below_the_lowest_tier_says_what_fills_the_device():
    spec, resources = layers(4, activation=50_000), RankResources(device_bytes=HUGE, host_bytes=HUGE)
    planned = plan(spec, resources, Constraints(policy="streamed"))
    error = why_not_lower(planned, spec, resources)
    assert "the device ran out of memory under a plan with a peak of" in error.message
    assert "activations 195.31 KiB (200000 bytes)" in error.message
    assert error.remedy == "Use activation checkpointing or a smaller batch."
