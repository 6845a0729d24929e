"""Generate the candidate placements that the planner chooses from.

Candidates follow from sizes, times and constraints, never from a budget. The planner takes the fastest one
that fits, so more memory never gives a slower plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.schedule import LANES, TimeModel
from nnx_colossalai.plan.spec import (
    Constraints,
    ModelSpec,
    Tier,
    allowed_tiers,
)
from nnx_core.errors import OptionError

Choice = tuple[Tier, ...]
"""A tier for every group, in their order."""


_ENUMERATED = 4096
"""The most placements that are all compared; above it the search selects some."""

_FEW = 7
"""The most groups with which all neighbours of every found placement are compared too."""

_MANY = 64
"""The most groups with which all neighbours on one greedy path are compared too."""

_BLOCKS = 500
"""The largest number of placements in blocks of one tier."""


def candidates(
    spec: ModelSpec, memory: MemoryModel, time: TimeModel, constraints: Constraints, *, exact: bool = True
) -> list[Choice]:
    """Return distinct placements to compare, which meet the constraints, in a fixed order.

    Args:
        spec: The model.
        memory: The memory model.
        time: The time model.
        constraints: The constraints.
        exact: True to return all placements if they are few.

    Raises:
        OptionError: These groups cannot meet the constraints together.
    """
    allowed = allowed_tiers(constraints, [group.name for group in spec.groups], spec.world_size)
    found: dict[Choice, None] = {}
    for options in _meeting_fractions(spec, [allowed[group.name] for group in spec.groups], constraints):
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
    """Return placements to compare, made of the allowed tiers of each group.

    Args:
        spec: The model.
        memory: The memory model.
        time: The time model.
        options: The allowed tiers of each group, from most device memory to least.
        exact: True to return all placements if they are few.
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


def meets_fractions(spec: ModelSpec, constraints: Constraints, choice: Choice) -> bool:
    """Return True if a placement has the wanted fractions, exact to one group."""
    trained = [group.trainable for group in spec.groups]
    for fraction, tiers in (
        (constraints.offload_fraction, (Tier.OFFLOADED, Tier.STREAMED)),
        (constraints.stream_fraction, (Tier.STREAMED,)),
    ):
        there = sum(numel for numel, tier in zip(trained, choice, strict=True) if tier in tiers)
        if fraction is not None and abs(there - fraction * sum(trained)) > max(trained, default=0):
            return False
    return True


def orders(spec: ModelSpec) -> list[list[int]]:
    """Return the orders in which the search moves groups off the device."""
    # Last to first: the last group's gradients are complete first, and its next forward comes last. Spread
    # evenly: copies overlap the most compute. Then first to last, and by size.
    forward = list(range(len(spec.groups)))
    largest = sorted(forward, key=lambda j: (-spec.groups[j].numel, j))
    return [forward[::-1], _spread(len(forward)), forward, largest, largest[::-1]]


def _spread(count: int) -> list[int]:
    """Return indices in an order whose every prefix is spread evenly, by reversed binary digits."""
    width = max(1, (count - 1).bit_length())
    reversed_digits = (int(format(at, f"0{width}b")[::-1], 2) for at in range(2**width))
    return [at for at in reversed_digits if at < count]


def _meeting_fractions(
    spec: ModelSpec, options: list[tuple[Tier, ...]], constraints: Constraints
) -> Iterator[list[tuple[Tier, ...]]]:
    """Yield narrowed tiers of each group; any choice from them has the wanted fractions."""
    if constraints.offload_fraction is None and constraints.stream_fraction is None:
        yield options
        return
    seen: set[tuple[tuple[Tier, ...], ...]] = set()
    for order in orders(spec):
        narrowed = options
        if constraints.offload_fraction is not None:
            host = {Tier.OFFLOADED, Tier.STREAMED}
            narrowed = _narrow(spec, narrowed, order, host, "offload_fraction", constraints.offload_fraction)
        if constraints.stream_fraction is not None:
            narrowed = _narrow(
                spec, narrowed, order, {Tier.STREAMED}, "stream_fraction", constraints.stream_fraction
            )
        if tuple(narrowed) not in seen:
            seen.add(tuple(narrowed))
            yield narrowed


def _narrow(
    spec: ModelSpec,
    options: Sequence[tuple[Tier, ...]],
    order: Sequence[int],
    chosen: set[Tier],
    name: str,
    fraction: float,
) -> list[tuple[Tier, ...]]:
    """Restrict each trained group to tiers in `chosen`, or to others, to meet a fraction."""
    # A group is taken, in order, if it brings the sum nearer to the target. The error is then at most half of
    # the smallest group left.
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
            f"{name}={fraction} cannot be met: with the other options, the nearest share of the trained "
            f"elements is {share:.3f}.",
            remedy=f"Set {name} to {share:.3f}, or leave out the tiers of single groups.",
        )
    return [
        tuple(tier for tier in tiers if not trained[j] or (tier in chosen) == (j in taken))
        for j, tiers in enumerate(options)
    ]


def _searched(
    spec: ModelSpec, memory: MemoryModel, time: TimeModel, options: Sequence[tuple[Tier, ...]]
) -> Iterator[Choice]:
    """Yield placements on paths from most to least device memory."""
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
    """Move one group at a time: the one that saves most device memory per lost second.

    Args:
        memory: The memory model.
        time: The time model.
        options: The allowed tiers of each group.
        order: The order among equal groups.
        lane: The lane whose seconds count, because it hides the others; None for all lanes.
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
    # Rounded, so that equal groups do not differ in the last bits and `order` decides between them.
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
    """Move all groups to the next tier one after the other, then to the tier after it."""
    current = [tiers[0] for tiers in options]
    yield tuple(current)
    for tier in tuple(Tier)[1:]:
        for j in order:
            if tier in options[j]:
                current[j] = tier
                yield tuple(current)


def _blocks(options: Sequence[tuple[Tier, ...]], order: Sequence[int]) -> Iterator[Choice]:
    """Yield the splits of an order into one block of each tier, in steps that bound their number."""
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
    """Yield every placement that differs in one group."""
    for j, tiers in enumerate(options):
        for tier in tiers:
            if tier is not choice[j]:
                yield (*choice[:j], tier, *choice[j + 1 :])
