"""The planner's memory model, recounted here from allocations with a start and an end."""

import random
from fractions import Fraction

import pytest

from jobs.colossalai_recount import FULL, random_spec, recount
from nnx_colossalai.plan.cost import footprint, memory
from nnx_colossalai.plan.schedule import step_time, work
from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier

TIERS = list(Tier)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("seed", range(150))
def test_memory_is_what_a_recount_of_every_allocation_says(seed):
    spec = random_spec(seed)
    draw = random.Random(seed)
    tiers = [draw.choice(TIERS) for _ in spec.groups]
    names = [group.name for group in spec.groups]
    counted = memory(spec, Placement(dict(zip(names, tiers, strict=True))))
    assert (counted.device, counted.host) == recount(spec, tiers)


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_is_the_sum_of_its_kinds_and_lies_below_the_peak(seed):
    spec = random_spec(seed)
    draw = random.Random(-seed)
    counted = memory(spec, Placement({group.name: draw.choice(TIERS) for group in spec.groups}))
    assert len(counted.timeline) == 2 * len(spec.groups) + 1
    assert [moment.phase for moment in counted.timeline[-2:]] == ["backward", "step"]
    for moment in counted.timeline:
        assert moment.device == sum(moment.by_kind.values()) <= counted.device
        assert min(moment.by_kind.values()) >= 0


def layers(count, numel=1000, **options):
    groups = tuple(Group(name=f"layers.{at}", numel=numel, trainable=numel) for at in range(count))
    return ModelSpec(groups=groups, **options)


@pytest.mark.parametrize(
    ("tier", "device", "host"),
    [
        (Tier.GATHERED, 4 * (2 + 4 + 4 + 8) + 2, 0),
        (Tier.SHARDED, 4 * (2 + 4 + 4 + 8) + 2, 0),
        (Tier.OFFLOADED, 4 * 2 + 2 + 2, 4 * 16 + 2 * 4),
        (Tier.STREAMED, 2 * 2 + 2 + 2, 4 * 18 + 2 * 4),
    ],
)
def test_four_layers_on_one_rank_take_what_the_table_says(tier, device, host):
    spec = layers(4)
    counted = memory(spec, Placement({group.name: tier for group in spec.groups}))
    assert (counted.device, counted.host) == (device * 1000, host * 1000)


def test_weights_that_are_their_own_masters_have_a_copy_only_where_the_masters_are_on_the_host():
    spec = layers(1, **FULL)
    group = spec.groups[0]
    assert footprint(spec, group, Tier.GATHERED).device == 1000 * (4 + 8)
    assert footprint(spec, group, Tier.OFFLOADED).weights == 4000
    assert footprint(spec, group, Tier.OFFLOADED).host_masters == 4000


def test_gathered_weights_stay_from_the_forward_to_the_backward_above_one_rank():
    spec = layers(3, world_size=2)
    counted = memory(spec, Placement({group.name: Tier.GATHERED for group in spec.groups}))
    assert [moment.gathered for moment in counted.timeline] == [2000, 4000, 6000, 6000, 4000, 2000, 0]


def test_weights_of_an_enclosing_module_are_in_use_while_the_inner_ones_run():
    spec = ModelSpec(groups=(*layers(3).groups, Group(name="", numel=500, trainable=0)))
    tiers = {**{group.name: Tier.OFFLOADED for group in spec.groups}, "": Tier.STREAMED}
    assert [moment.gathered for moment in memory(spec, Placement(tiers)).timeline] == [1000] * 8 + [0]


def test_gradients_of_the_batch_before_count_in_the_forward_where_they_are_still_there():
    peaks = {
        there: memory(
            ModelSpec(
                groups=(
                    Group(name="a", numel=1000, trainable=1000, activation_bytes=50_000),
                    Group(name="b", numel=1, trainable=1),
                ),
                gradients_in_forward=there,
            ),
            Placement({"a": Tier.GATHERED, "b": Tier.GATHERED}),
        ).timeline[1]
        for there in (True, False)
    }
    assert peaks[True].gradients == 4004
    assert peaks[False].gradients == 0


@pytest.mark.parametrize(
    ("ranks", "tier", "to_device", "to_host"),
    [
        (1, Tier.GATHERED, 0, 0),
        (1, Tier.OFFLOADED, 2, 2),
        (1, Tier.STREAMED, 4, 2),
        (2, Tier.SHARDED, 0, 0),
        (2, Tier.OFFLOADED, Fraction(2, 2), Fraction(4, 2)),
        (2, Tier.STREAMED, Fraction(4, 2), Fraction(4, 2)),
    ],
)
def test_bytes_moved_per_element_are_those_of_the_formula(ranks, tier, to_device, to_host):
    spec = layers(1, world_size=ranks)
    one = work(spec, spec.groups[0], tier)
    assert (one.to_device, one.to_host) == (1000 * to_device, 1000 * to_host)


def test_a_frozen_group_is_neither_refreshed_nor_sends_gradients():
    group = Group(name="frozen", numel=1000, trainable=0)
    one = work(ModelSpec(groups=(group,)), group, Tier.OFFLOADED)
    assert (one.to_device, one.to_host, one.host_step, one.device_step) == (0, 0, 0, 0)


def timed(tier, *, overlapped, count=4, compute=3.0, **rates):
    groups = tuple(
        Group(name=f"layers.{at}", numel=1000, trainable=1000, compute_seconds=compute) for at in range(count)
    )
    fast = dict.fromkeys(("to_device", "to_host", "host_step", "device_step", "collective"), 1e15)
    resources = RankResources(device_bytes=1, host_bytes=1, **{**fast, **rates})
    placement = Placement({group.name: tier for group in groups})
    return step_time(ModelSpec(groups=groups), resources, placement, overlapped=overlapped).seconds


def test_a_step_on_the_host_is_hidden_behind_the_forward_only_where_it_overlaps():
    """4 s of stepping and 12 s of computing, of which the forward of the first layer waits for 1 s."""
    assert timed(Tier.OFFLOADED, overlapped=False, host_step=1000) == pytest.approx(16 + 0.05 * 4)
    assert timed(Tier.OFFLOADED, overlapped=True, host_step=1000) == pytest.approx(13 + 0.05 * 4)


def test_fetching_is_hidden_behind_the_layer_before():
    """Half a second a fetch: only the first of a forward and the first of a backward are waited for."""
    seconds = timed(Tier.STREAMED, overlapped=True, to_device=4000)
    assert seconds == pytest.approx(12 + 2 * 0.5 + 0.05 * 4, rel=1e-6)


def test_a_slow_lane_sets_the_time_of_the_step():
    """80 s of fetching, which only stops while the last layer's forward and the first one's backward run."""
    seconds = timed(Tier.STREAMED, overlapped=True, to_device=200)
    assert seconds == pytest.approx(80 + 1 + 2 + 0.05 * 80, rel=1e-6)


def test_computing_alone_takes_what_it_takes():
    assert timed(Tier.GATHERED, overlapped=True) == pytest.approx(12)
    assert timed(Tier.GATHERED, overlapped=True, device_step=1000) == pytest.approx(16)
