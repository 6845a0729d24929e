"""Policies of placing chunks: the candidates that a plan is chosen from.

Owns how candidates are made from sizes, times and wishes. They never depend on a budget: the planner takes
the fastest that fits, so more memory can never give a slower plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.schedule import LANES, TimeModel
from nnx_colossalai.plan.spec import (
    ModelSpec,
    Tier,
    Wishes,
    allowed_tiers,
)
from nnx_core.errors import OptionError

Choice = tuple[Tier, ...]
"""A tier for every group, in their order."""


_ENUMERATED = 4096  # placements that are all looked at, instead of being searched


_FEW = 7  # groups up to which every change of one group is looked at, of all placements found


_MANY = 64  # the same, of those on one way only


_BLOCKS = 500  # placements in blocks of one tier that are looked at


def candidates(
    spec: ModelSpec, memory: MemoryModel, time: TimeModel, wishes: Wishes, *, exact: bool = True
) -> list[Choice]:
    """Placements that keep to the wishes and are worth comparing, each once, in a fixed order.

    Args:
        spec: The model.
        memory: Its memory.
        time: Its time.
        wishes: The constraints that are asked for.
        exact: True if all placements are taken where they are few.

    Raises:
        OptionError: The wishes cannot be met together by these groups.
    """
    allowed = allowed_tiers(wishes, [group.name for group in spec.groups], spec.world_size)
    found: dict[Choice, None] = {}
    for options in _meeting_fractions(spec, [allowed[group.name] for group in spec.groups], wishes):
        found.update(dict.fromkeys(search(spec, memory, time, options, exact=exact)))
    return list(found)


def search(
    spec: ModelSpec,
    memory: MemoryModel,
    time: TimeModel,
    options: Sequence[tuple[Tier, ...]],
    *,
    exact: bool = True,
) -> list[Choice]:
    """Placements out of the tiers that each group may have, which are worth comparing.

    Args:
        spec: The model.
        memory: Its memory.
        time: Its time.
        options: Tiers of each group, from most device memory to least.
        exact: True if all placements are taken where they are few.
    """
    if exact and prod(map(len, options)) <= _ENUMERATED:
        return list(product(*options))
    found = dict.fromkeys(_searched(spec, memory, time, options))
    if len(options) <= _FEW:
        near = list(found)
    elif len(options) <= _MANY:
        near = list(_greedy(memory, time, options, orders(spec)[0], None))
    else:
        near = []
    found.update(dict.fromkeys(one for choice in near for one in _neighbours(choice, options)))
    return list(found)


def meets_fractions(spec: ModelSpec, wishes: Wishes, choice: Choice) -> bool:
    """Return True if a placement has the fractions that are wished for, to within one group."""
    trained = [group.trainable for group in spec.groups]
    for fraction, tiers in (
        (wishes.offload_fraction, (Tier.OFFLOADED, Tier.STREAMED)),
        (wishes.stream_fraction, (Tier.STREAMED,)),
    ):
        there = sum(numel for numel, tier in zip(trained, choice, strict=True) if tier in tiers)
        if fraction is not None and abs(there - fraction * sum(trained)) > max(trained, default=0):
            return False
    return True


def orders(spec: ModelSpec) -> list[list[int]]:
    """Orders in which groups are moved off the device.

    From the last to the first, because the gradients of the last are complete first and its next forward is
    the last; spread evenly, so that copies have the most computing to hide behind; from the first; by size.
    """
    forward = list(range(len(spec.groups)))
    largest = sorted(forward, key=lambda j: (-spec.groups[j].numel, j))
    return [forward[::-1], _spread(len(forward)), forward, largest, largest[::-1]]


def _spread(count: int) -> list[int]:
    """Places in an order whose every beginning is spread over all of them: by reversed binary digits."""
    width = max(1, (count - 1).bit_length())
    reversed_digits = (int(format(at, f"0{width}b")[::-1], 2) for at in range(2**width))
    return [at for at in reversed_digits if at < count]


def _meeting_fractions(
    spec: ModelSpec, options: list[tuple[Tier, ...]], wishes: Wishes
) -> Iterator[list[tuple[Tier, ...]]]:
    """The tiers of each group, narrowed in several ways so that any choice from them has the fractions."""
    if wishes.offload_fraction is None and wishes.stream_fraction is None:
        yield options
        return
    seen: set[tuple[tuple[Tier, ...], ...]] = set()
    for order in orders(spec):
        narrowed = options
        if wishes.offload_fraction is not None:
            host = {Tier.OFFLOADED, Tier.STREAMED}
            narrowed = _narrow(spec, narrowed, order, host, "offload_fraction", wishes.offload_fraction)
        if wishes.stream_fraction is not None:
            narrowed = _narrow(
                spec, narrowed, order, {Tier.STREAMED}, "stream_fraction", wishes.stream_fraction
            )
        if tuple(narrowed) not in seen:
            seen.add(tuple(narrowed))
            yield narrowed


def _narrow(
    spec: ModelSpec,
    options: Sequence[tuple[Tier, ...]],
    order: Sequence[int],
    chosen: set[Tier],
    wish: str,
    fraction: float,
) -> list[tuple[Tier, ...]]:
    """Leave trained groups only tiers in `chosen`, or only others, so that the former have the fraction.

    Groups are taken in the order given as long as each brings the sum nearer to what is asked for, which
    ends within half of the smallest group that could still be taken.
    """
    trained = [group.trainable for group in spec.groups]
    target = fraction * sum(trained)
    forced = [j for j, tiers in enumerate(options) if chosen.issuperset(tiers)]
    free = [j for j in order if j not in forced and chosen.intersection(options[j]) and trained[j]]
    taken, total = set(forced), sum(trained[j] for j in forced)
    for j in free:
        if abs(total + trained[j] - target) < abs(total - target):
            taken.add(j)
            total += trained[j]
    if abs(total - target) > max(trained, default=0):
        share = total / sum(trained)
        raise OptionError(
            f"{wish}={fraction} cannot be met: with the tiers asked for and the other fraction, {share:.3f} "
            "is the nearest share of the trained elements.",
            remedy=f"Set {wish} to {share:.3f}, or leave out the tiers of single groups.",
        )
    return [
        tuple(tier for tier in tiers if not trained[j] or (tier in chosen) == (j in taken))
        for j, tiers in enumerate(options)
    ]


def _searched(
    spec: ModelSpec, memory: MemoryModel, time: TimeModel, options: Sequence[tuple[Tier, ...]]
) -> Iterator[Choice]:
    """Placements on the ways from most to least device memory."""
    all_orders = orders(spec)
    for lane in (None, *range(len(LANES))):
        for order in all_orders[:2]:
            yield from _greedy(memory, time, options, order, lane)
    for order in all_orders:
        yield from _tier_by_tier(options, order)
        yield from _blocks(options, order)


def _greedy(
    memory: MemoryModel,
    time: TimeModel,
    options: Sequence[tuple[Tier, ...]],
    order: Sequence[int],
    lane: int | None,
) -> Iterator[Choice]:
    """Move one group at a time, the one that saves most device memory per second that is lost.

    Args:
        memory: The memory of the model.
        time: The time of the model.
        options: Tiers of each group.
        order: Decides which of several equal groups goes first.
        lane: Whose seconds count, because the others are hidden behind it; None: all of them.
    """

    def best(j: int, at: int) -> tuple[float, int] | None:
        moves = [
            (-saved / (max(0.0, seconds(j, to) - seconds(j, at)) + 1e-9), to)
            for to in range(at + 1, len(options[j]))
            if (saved := _stays(memory, j, options[j][at]) - _stays(memory, j, options[j][to])) > 0
        ]
        return min(moves, default=None)

    def seconds(j: int, at: int) -> float:
        lanes = time.lanes(j, options[j][at])
        return sum(lanes) if lane is None else lanes[lane] + 1e-3 * sum(lanes)

    current = [0] * len(options)
    rank = {j: place for place, j in enumerate(order)}
    heap = [(float(f"{move[0]:.6g}"), rank[j], j, move[1]) for j in order if (move := best(j, 0))]
    heapq.heapify(heap)
    yield tuple(tiers[0] for tiers in options)
    while heap:
        _, _, j, to = heapq.heappop(heap)
        current[j] = to
        yield tuple(tiers[at] for tiers, at in zip(options, current, strict=True))
        if move := best(j, to):
            heapq.heappush(heap, (float(f"{move[0]:.6g}"), rank[j], j, move[1]))


def _stays(memory: MemoryModel, j: int, tier: Tier) -> int:
    one = memory.footprints[j][tier]
    return one.device + one.gradients + (one.in_use if one.kept else 0)


def _tier_by_tier(options: Sequence[tuple[Tier, ...]], order: Sequence[int]) -> Iterator[Choice]:
    """All groups to the next tier, one after the other, then all of them to the one after it."""
    current = [tiers[0] for tiers in options]
    yield tuple(current)
    for tier in tuple(Tier)[1:]:
        for j in order:
            if tier in options[j]:
                current[j] = tier
                yield tuple(current)


def _blocks(options: Sequence[tuple[Tier, ...]], order: Sequence[int]) -> Iterator[Choice]:
    """Every division of an order into a block of each tier, in steps that keep their number bounded."""
    tiers = sorted({tier for one in options for tier in one}, key=tuple(Tier).index, reverse=True)
    count, cuts = len(order), len(tiers) - 1
    steps = count
    while steps > 1 and prod(range(steps + 1, steps + cuts + 1)) // prod(range(1, cuts + 1)) > _BLOCKS:
        steps -= 1
    ends = [round(at * count / steps) for at in range(steps + 1)] if steps else [0]
    for marks in combinations(range(steps + cuts), cuts):
        borders = [0, *(ends[mark - at] for at, mark in enumerate(marks)), count]
        choice = [tiers_of[0] for tiers_of in options]
        for tier, begin, end in zip(tiers, borders, borders[1:], strict=False):
            for j in order[begin:end]:
                if tier in options[j]:
                    choice[j] = tier
        yield tuple(choice)


def _neighbours(choice: Choice, options: Sequence[tuple[Tier, ...]]) -> Iterator[Choice]:
    """Every placement that differs in one group."""
    for j, tiers in enumerate(options):
        for tier in tiers:
            if tier is not choice[j]:
                yield (*choice[:j], tier, *choice[j + 1 :])
