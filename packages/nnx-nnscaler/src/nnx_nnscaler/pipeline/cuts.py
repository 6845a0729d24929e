"""Search for the cuts between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

from nnx_core.errors import PlanError
from nnx_nnscaler.pipeline.outline import Outline, Room, StageCosts, bytes_in
from nnx_nnscaler.plan.schedules import Arrangement

_SLACK = 1.02
"""The relative time by which the longest stage may exceed the best one, to send fewer bytes."""


_POWERS = (1, 2, 4, 8, 16, 48, 400)
"""Multiples of that slack, in the order of the tries, by which the longest stage may grow to save memory."""


_GAP, _SECONDS = 0.05, 2.0
"""HiGHS's tolerance for the fewest bytes, and its time limit, after which it returns its best cut.
The limit is eight times as long if only memory counts."""


def choose_cuts(
    costs: StageCosts,
    stages: int,
    *,
    foreign: NDArray[np.float64] | None = None,
    rooms: Sequence[Room] = (),
) -> list[int] | None:
    """Return the places where stages begin: first the shortest longest stage counts, then the fewest bytes.

    Args:
        costs: The costs of cuts.
        stages: The number of stages.
        foreign: The bytes, up to each place, of parameters that each stage's rank does not store, if
            parameters have homes already; the fewest of these count first. Shape (stages, places).
        rooms: The memory of the ranks; empty for no limit.

    Returns:
        The places at which the second and later stages begin; None if no cut fits into the memory.

    Raises:
        PlanError: There are too few places.
    """
    places = [0, *np.flatnonzero(costs.may).tolist(), len(costs.may) - 1]
    if len(places) < stages + 1:
        raise PlanError(
            f"the model can be cut into {len(places) - 1} stages at most, and {stages} are requested.",
            remedy=f"Set pipeline_nstages to {len(places) - 1} or less.",
        )
    costs = costs._replace(**{name: values[places] for name, values in costs._asdict().items()})
    taken = costs.seconds[None, :] - costs.seconds[:, None]  # from a place (row) to a later one (column)
    if foreign is not None:
        spans = [row[places][None, :] - row[places][:, None] for row in foreign]
        return [places[index] for index in _search(spans, taken, costs.sent)]
    if any(len(room.shares) > 1 for room in rooms):
        found = _Cuts(costs, stages, rooms).search(_shortest_longest([taken] * stages))
    else:
        bytes_of_stage = [np.zeros_like(taken)] * stages
        for room in rooms:
            ((stage, share),) = room.shares.items()
            bytes_of_stage[stage] = np.where(_bytes(costs, share) <= room.limit, 0.0, np.inf)
        longest = _shortest_longest([taken + fits for fits in bytes_of_stage])
        bounds = [np.where(taken <= longest * _SLACK, fits, np.inf) for fits in bytes_of_stage]
        found = _search(bounds, taken, costs.sent) if np.isfinite(longest) else None
    return None if found is None else [places[index] for index in found]


def _bytes(costs: StageCosts, share: float) -> NDArray[np.float64]:
    """Return the bytes of a stage between two places, with activations of a share of the batch."""
    up_to = costs.lasting + share * costs.kept
    crossing = share * costs.sent
    return (up_to + crossing)[None, :] - (up_to - crossing)[:, None]


def _shortest_longest(taken: Sequence[NDArray[np.float64]]) -> float:
    """Return the time of the longest stage of the best cut, from each stage's time between two places."""
    best = taken[0][0].copy()
    best[0] = np.inf
    upper = np.triu(np.ones_like(taken[0], dtype=bool), k=1)
    for one in taken[1:]:
        best = np.where(upper, np.maximum(best[:, None], one), np.inf).min(axis=0)
    return float(best[-1])


class _Cuts:
    """The choice of cuts as an integer program for HiGHS, with one binary for each cut and place.

    Args:
        costs: The costs of cuts, at places where stages may begin.
        stages: The number of stages.
        rooms: The memory of the ranks.
    """

    def __init__(self, costs: StageCosts, stages: int, rooms: Sequence[Room]) -> None:
        self._costs = costs
        self._cuts, self._places = stages - 1, len(costs.seconds) - 2
        ones = np.kron(np.eye(self._cuts), np.ones(self._places))
        order, _ = self._of_stages(np.arange(len(costs.seconds), dtype=float))
        self._rows = [LinearConstraint(ones, 1, 1), LinearConstraint(order[1:-1], 1, np.inf)]
        for room in rooms:
            row, constant = np.zeros(self._cuts * self._places), 0.0
            for stage, share in room.shares.items():
                up_to, end = self._of_stages(costs.lasting + share * costs.kept)
                row, constant = row + up_to[stage], constant + end[stage]
                for cut in (stage - 1, stage):
                    if 0 <= cut < self._cuts:
                        row[cut * self._places : (cut + 1) * self._places] += share * costs.sent[1:-1]
                    else:
                        constant += share * costs.sent[0 if cut < 0 else -1]
            most = max(room.limit, 1.0)
            self._rows.append(LinearConstraint(row[None] / most, -np.inf, 1 - constant / most))

    def _of_stages(self, prefix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each stage's share of a running sum: coefficients of the binaries, and a constant."""
        at = np.kron(np.eye(self._cuts), prefix[1:-1])
        none = np.zeros((1, at.shape[1]))
        constant = np.zeros(self._cuts + 1)
        constant[0], constant[-1] = -prefix[0], prefix[-1]
        return np.vstack([at, none]) - np.vstack([none, at]), constant

    def search(self, shortest: float) -> list[int] | None:
        """Return the best cut as numbers of places; None if none fits.

        Args:
            shortest: The time of the longest stage of the best cut without a memory limit.
        """
        for power in _POWERS:
            seconds = _SECONDS if power < _POWERS[-1] else 8 * _SECONDS
            if (found := self._within(shortest * _SLACK**power, seconds)) is not None:
                return found
        return None

    def _within(self, longest: float, most: float) -> list[int] | None:
        """Return the cut that sends the fewest bytes, within a limit of the longest stage, or None."""
        seconds = self._costs.seconds / longest
        number = np.arange(1, self._cuts + 1)[:, None]
        early = seconds[-1] - seconds[1:-1] > self._cuts + 1 - number
        late = seconds[1:-1] - seconds[0] > number  # such a place is too far from the end or the start
        each, last = self._of_stages(seconds)
        outcome = milp(
            np.tile(self._costs.sent[1:-1], self._cuts) / max(float(self._costs.sent.max()), 1.0),
            integrality=np.ones(self._cuts * self._places),
            bounds=Bounds(0, np.where(early | late, 0.0, 1.0).ravel()),
            constraints=[*self._rows, LinearConstraint(each, -np.inf, 1 - last)],
            options={"mip_rel_gap": _GAP, "time_limit": most},
        )
        if outcome.x is None:
            return None
        chosen = outcome.x.reshape(self._cuts, self._places).argmax(axis=1)
        return [int(place) + 1 for place in chosen]


def _search(
    spans: Sequence[NDArray[np.float64]], taken: NDArray[np.float64], sent: NDArray[np.float64]
) -> list[int]:
    """Return the cuts with the least sum of stage spans, then of bytes sent, then of squared times."""
    scale = 1.0 / max(float(sent.max()), 1.0)
    even = 1e-6 / max(float(taken.max()) ** 2, 1e-30)
    upper = np.triu(np.ones_like(taken, dtype=bool), k=1)
    total: NDArray[np.float64] | None = None
    steps: list[NDArray[np.int64]] = []
    for span in spans:
        cost = np.where(upper, span * 1e3 + even * taken**2, np.inf)
        if total is None:
            total = cost[0]
            continue
        combined = (total + sent * scale)[:, None] + cost
        steps.append(np.asarray(combined.argmin(axis=0)))
        total = combined.min(axis=0)
    cuts = []
    place = len(sent) - 1
    for step in reversed(steps):
        place = int(step[place])
        cuts.append(place)
    return cuts[::-1]


def foreign_bytes(
    outline: Outline, homes: Mapping[str, int], arrangement: Arrangement
) -> NDArray[np.float64]:
    """Return the bytes of parameters that each stage would fetch from another rank, up to each place.

    A parameter counts at its first use, because any cut must fetch one that several stages use.

    Args:
        outline: The operators.
        homes: The rank along the pipe that stores each parameter, by fully qualified name.
        arrangement: The stages of each rank along the pipe.
    """
    graph = outline.graph
    found = np.zeros((arrangement.stages, len(outline.ops) + 1))
    seen: set[str] = set()
    for index, op in enumerate(outline.ops):
        found[:, index + 1] = found[:, index]
        for name in op.operands():
            if name in graph.parameters and name not in seen:
                seen.add(name)
                home = homes.get(graph.parameters[name], 0)
                nbytes = bytes_in(graph, name)
                for stage in range(arrangement.stages):
                    found[stage, index + 1] += nbytes * (arrangement.rank_of(stage) != home)
    return found
