"""Constraints of a plan are met, or refused as contradictory or as impossible."""

import pytest

from jobs.colossalai_recount import HUGE, layers, llama, random_spec, tiers_of
from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.planner import evaluate, plan
from nnx_colossalai.plan.spec import (
    Constraints,
    Group,
    ModelSpec,
    Placement,
    RankResources,
    Tier,
    format_bytes,
)
from nnx_core.errors import OptionError, PlanError

# ---------------------------------------------------------------- what is asked for


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("fraction", [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.77, 1])
@pytest.mark.parametrize("model", ["layers", "llama", "ragged"])
def test_the_fraction_offloaded_is_what_was_asked_for_to_within_one_group(model, fraction):
    spec = {"layers": layers(12), "llama": llama(), "ragged": random_spec(5, most=12)}[model]
    planned = plan(
        spec, RankResources(device_bytes=HUGE, host_bytes=HUGE), Constraints(offload_fraction=fraction)
    )
    trained = [group.trainable for group in spec.groups]
    there = sum(numel for numel, tier in zip(trained, tiers_of(planned), strict=True) if tier.steps_on_host)
    assert abs(there - fraction * sum(trained)) <= max(trained) / 2
    if fraction in (0, 1):
        assert there == fraction * sum(trained)


@pytest.mark.parametrize("streamed", [0, 0.1, 0.5])
def test_streamed_ones_are_part_of_the_offloaded_ones(streamed):
    spec = layers(20)
    constraints = Constraints(offload_fraction=0.5, stream_fraction=streamed)
    tiers = tiers_of(plan(spec, RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints))
    assert sum(tier.steps_on_host for tier in tiers) == 10
    assert sum(tier is Tier.STREAMED for tier in tiers) == 20 * streamed


def test_a_fraction_of_streamed_groups_alone_leaves_the_others_to_the_planner():
    constraints = Constraints(stream_fraction=0.25)
    tiers = tiers_of(plan(layers(8), RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints))
    assert tiers.count(Tier.STREAMED) == 2 and tiers.count(Tier.GATHERED) == 6


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("cuda", Tier.GATHERED), ("cpu", Tier.STREAMED), *((tier.value, tier) for tier in Tier)],
)
def test_a_policy_puts_every_group_where_it_says(policy, expected):
    planned = plan(layers(3), RankResources(device_bytes=HUGE, host_bytes=HUGE), Constraints(policy=policy))
    assert set(tiers_of(planned)) == {expected}


def test_single_groups_can_be_placed_by_name():
    constraints = Constraints(tiers={"layers.1": "streamed"})
    planned = plan(layers(3), RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints)
    assert tiers_of(planned) == [Tier.GATHERED, Tier.STREAMED, Tier.GATHERED]
    assert planned.reasons["layers.1"] == "asked for"


def test_complete_weights_are_kept_nowhere_where_that_is_not_allowed():
    constraints = Constraints(gathered_allowed=False)
    for world_size in (1, 4):
        planned = plan(
            layers(3, world_size=world_size), RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints
        )
        assert set(tiers_of(planned)) == {Tier.SHARDED}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6, 1.0])
def test_the_margin_is_the_share_of_the_free_device_memory_that_masters_and_state_take(ratio):
    spec = layers(10, activation=5000)
    weights = MemoryModel(spec).device_peak([Tier.OFFLOADED] * 10)
    resources = RankResources(device_bytes=weights + 100_000, host_bytes=HUGE)
    planned = plan(spec, resources, Constraints(gpu_margin_ratio=ratio))
    there = tiers_of(planned).count(Tier.GATHERED)
    assert there == min(int(ratio * 100_000 // 16_000), 6)


def test_frozen_groups_do_not_count_in_a_fraction():
    frozen = tuple(Group(name=f"frozen.{at}", numel=5000, trainable=0) for at in range(4))
    spec = ModelSpec(groups=(*frozen, *layers(4).groups))
    constraints = Constraints(offload_fraction=0.5)
    tiers = tiers_of(plan(spec, RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints))
    assert sum(tier.steps_on_host for tier in tiers[4:]) == 2
    assert set(tiers[:4]) == {Tier.GATHERED}


@pytest.mark.parametrize(
    ("constraints", "one", "other"),
    [
        ({"offload_fraction": 0.2, "stream_fraction": 0.3}, "stream_fraction=0.3", "offload_fraction=0.2"),
        ({"policy": "cuda", "offload_fraction": 0.1}, "policy='cuda'", "offload_fraction=0.1"),
        ({"policy": "cuda", "stream_fraction": 0.1}, "policy='cuda'", "stream_fraction=0.1"),
        ({"policy": "cpu", "offload_fraction": 0.9}, "policy='cpu'", "offload_fraction=0.9"),
        ({"policy": "cpu", "stream_fraction": 0.9}, "policy='cpu'", "stream_fraction=0.9"),
        ({"policy": "offloaded", "stream_fraction": 0.5}, "policy='offloaded'", "stream_fraction=0.5"),
        ({"policy": "sharded", "offload_fraction": 1}, "policy='sharded'", "offload_fraction=1"),
        ({"policy": "cpu", "gpu_margin_ratio": 0.5}, "policy='cpu'", "gpu_margin_ratio=0.5"),
        ({"offload_fraction": 0.5, "gpu_margin_ratio": 0.5}, "offload_fraction=0.5", "gpu_margin_ratio=0.5"),
        ({"policy": "gathered", "gathered_allowed": False}, "policy='gathered'", "gathered_allowed=False"),
        ({"policy": "cuda", "tiers": {"a": "streamed"}}, "policy='cuda'", "tier 'streamed' of 'a'"),
        (
            {"tiers": {"a": "gathered"}, "gathered_allowed": False},
            "tier 'gathered' of 'a'",
            "gathered_allowed=False",
        ),
    ],
)
def test_constraints_that_contradict_each_other_are_both_named(constraints, one, other):
    with pytest.raises(OptionError) as error:
        Constraints(**constraints)
    assert one in str(error.value) and other in str(error.value) and "contradicts" in str(error.value)
    assert error.value.remedy == "Leave one of them out."


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"offload_fraction": 1.5}, "offload_fraction is 1.5. Give a number from 0 to 1, or None."),
        ({"stream_fraction": -0.1}, "stream_fraction is -0.1. Give a number from 0 to 1, or None."),
        ({"gpu_margin_ratio": float("nan")}, "gpu_margin_ratio is nan. Give a number from 0 to 1, or None."),
        ({"offload_fraction": "half"}, "offload_fraction is 'half'. Give a number from 0 to 1, or None."),
        (
            {"policy": "gpu"},
            "policy 'gpu' is unknown. Did you mean 'cpu'? Choose one of auto, cuda, cpu, gathered, ",
        ),
        (
            {"tiers": {"a": "nvme"}},
            "tier 'nvme' of 'a' is unknown. Choose one of gathered, sharded, offloaded, streamed.",
        ),
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused(constraints, message):
    with pytest.raises(OptionError) as error:
        Constraints(**constraints)
    assert str(error.value).startswith(message)


def test_a_tier_for_a_group_that_there_is_not_names_the_nearest():
    with pytest.raises(OptionError, match=r"no group of that name. Nearest names: 'layers.1'"):
        plan(
            layers(3),
            RankResources(device_bytes=HUGE, host_bytes=HUGE),
            Constraints(tiers={"layer.1": "sharded"}),
        )


def test_a_fraction_that_single_groups_make_impossible_says_what_is_nearest():
    constraints = Constraints(offload_fraction=0.0, tiers={"layers.0": "offloaded", "layers.1": "offloaded"})
    with pytest.raises(OptionError) as error:
        plan(layers(4), RankResources(device_bytes=HUGE, host_bytes=HUGE), constraints)
    assert "offload_fraction=0.0 cannot be met" in str(error.value)
    assert error.value.remedy == "Set offload_fraction to 0.500, or leave out the tiers of single groups."


# ---------------------------------------------------------------- what does not fit


def refused(spec, device, host, **constraints):
    with pytest.raises(PlanError) as error:
        plan(spec, RankResources(device_bytes=device, host_bytes=host), Constraints(**constraints))
    return error.value


def test_a_device_too_small_for_the_largest_layer_names_it_the_bytes_and_the_knob():
    spec = ModelSpec(groups=(*layers(3).groups, Group(name="head", numel=9000, trainable=9000)))
    needed = MemoryModel(spec).device_peak([Tier.STREAMED] * 4)
    error = refused(spec, 30_000, HUGE)
    least = f"the least device memory that a step needs is {format_bytes(needed)}"
    assert f"{least}, 29.30 KiB (30000 bytes) are allowed." in error.message
    assert (
        "The largest group is 'head' with 9000 elements, 17.58 KiB (18000 bytes) of complete weights."
        in error.message
    )
    assert error.remedy == "Raise device_memory, or lower chunk_size, so that the largest group is divided."
    plan(spec, RankResources(device_bytes=needed, host_bytes=HUGE))


def test_activations_that_do_not_fit_ask_for_checkpointing():
    error = refused(layers(4, activation=50_000), 150_000, HUGE)
    assert (
        "Its peak is in the backward of group 'layers.3': activations 195.31 KiB (200000 bytes)"
        in error.message
    )
    assert error.remedy == "Raise device_memory, or use activation checkpointing or a smaller batch."


def test_a_host_too_small_names_what_it_needs_beside_that_device():
    error = refused(layers(4), 20_000, 30_000)
    assert "with 19.53 KiB (20000 bytes) of device memory a step needs at least" in error.message
    assert "of host memory on each rank, 29.30 KiB (30000 bytes) are allowed." in error.message
    assert error.remedy == "Raise host_memory or device_memory, or use more ranks."


@pytest.mark.parametrize(
    "constraints",
    [
        {"policy": "cuda"},
        {"offload_fraction": 0.25},
        {"tiers": {"layers.0": "gathered", "layers.1": "gathered"}},
    ],
)
def test_constraints_that_do_not_fit_are_named_where_a_plan_without_them_would(constraints):
    error = refused(layers(4), 30_000, HUGE, **constraints)
    assert error.message.startswith(
        f"no placement with {Constraints(**constraints).given} fits: the least that it needs is "
    )
    assert (
        "29.30 KiB (30000 bytes) are allowed" in error.message
        and "Without it a placement fits." in error.message
    )
    assert error.remedy == "Leave it out or relax it, or raise device_memory or host_memory."


@pytest.mark.parametrize(
    ("groups", "rates", "message"),
    [
        ([("a", 5, 5), ("a", 5, 5)], {}, r"several groups are named \['a'\]"),
        ([("a", 5, 6)], {}, "group 'a' has 5 elements of which 6 are trained"),
        ([("a", 5, 5)], {"to_host": 0.0}, "the rate to_host is 0.0. Give a number above 0, or measure it."),
    ],
)
def test_sizes_and_rates_that_make_no_sense_are_refused(groups, rates, message):
    spec = ModelSpec(groups=tuple(Group(name=name, numel=n, trainable=t) for name, n, t in groups))
    with pytest.raises(OptionError, match=message):
        plan(spec, RankResources(device_bytes=HUGE, host_bytes=HUGE, **rates))


def test_a_placement_without_a_tier_for_a_group_is_refused():
    with pytest.raises(PlanError, match=r"no tier for \['layers.1'\]. Add one for each group."):
        evaluate(
            layers(2),
            RankResources(device_bytes=HUGE, host_bytes=HUGE),
            Placement({"layers.0": Tier.SHARDED}),
        )


def test_a_model_without_groups_is_planned():
    planned = plan(ModelSpec(groups=()), RankResources(device_bytes=10, host_bytes=0))
    assert tiers_of(planned) == [] and planned.memory.device == 0 and planned.seconds == 0
