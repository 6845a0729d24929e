"""Order the actions of pipeline schedules, and simulate their time and memory.

An `Arrangement` assigns stages to ranks. `order` lists the actions of each rank, as in
`torch.distributed.pipelining`. `simulate` predicts the times of actions if messages take no time, and `held`
the number of activations that a rank holds at once. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from nnx_core.errors import OptionError, PlanError
from nnx_core.options import check_choice
from nnx_nnscaler._torch_compat import schedule_actions
from nnx_nnscaler.options import SCHEDULES

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUTS: "backward, inputs",
    WEIGHTS: "backward, weights",
}
"""The names of the kinds of actions in messages."""
FORWARD_SHARE = 1 / 3
"""The forward's share of a stage's time: backward has two matrix products for each one of the forward."""


class Arrangement(NamedTuple):
    """The stages of each rank along the pipe.

    Attributes:
        ranks: The number of ranks along the pipe.
        stages: The number of stages, a multiple of the ranks.
        v_shaped: True if the second stages of the ranks are in reverse order: the first rank has the last.
    """

    ranks: int
    stages: int
    v_shaped: bool = False

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage.

        Example:
            >>> [Arrangement(2, 4).rank_of(stage) for stage in range(4)]
            [0, 1, 0, 1]
            >>> [Arrangement(2, 4, v_shaped=True).rank_of(stage) for stage in range(4)]
            [0, 1, 1, 0]
        """
        loop, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and loop % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: ``"F"`` for forward, ``"B"`` for backward; a split backward has ``"I"`` for the gradients of
            inputs and ``"W"`` for those of weights.
        stage: The stage.
        microbatch: The microbatch.
    """

    kind: str
    stage: int
    microbatch: int


@lru_cache(maxsize=256)
def actions(
    schedule: str, ranks: int, stages: int, microbatches: int
) -> tuple[tuple[Action, ...], ...] | None:
    """Return each rank's actions, in order; None if the schedule has no order for so many microbatches.

    Args:
        schedule: A name of `nnx_nnscaler.options.SCHEDULES`.
        ranks: The number of ranks along the pipe.
        stages: The number of stages of all ranks.
        microbatches: The number of microbatches.

    Example:
        >>> first, last = actions("1f1b", 2, 2, 2)
        >>> ["".join(map(str, action)) for action in first]
        ['F00', 'F01', 'B00', 'B01']
    """
    if schedule in _SIMPLE:
        return tuple(
            _SIMPLE[schedule](ranks - rank, range(rank, stages, ranks), microbatches) for rank in range(ranks)
        )
    try:
        found = schedule_actions(SCHEDULES[schedule], ranks, microbatches, stages // ranks)
    # torch's schedules check their arguments with both kinds of errors.
    except (ValueError, AssertionError):
        return None
    return tuple(tuple(Action(*action) for action in rank) for rank in found)


def _gpipe(left: int, own: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """Run all forwards, then all backwards in reverse order."""
    each = range(microbatches)
    there = [Action(FORWARD, stage, index) for stage in own for index in each]
    return (*there, *(Action(BACKWARD, stage, index) for _, stage, index in reversed(there)))


def _one_forward_one_backward(left: int, own: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """Run as many forwards as there are stages from here on, then alternate backward and forward."""
    (stage,) = own
    # So many are in flight before the first backward comes back to this stage.
    order = [Action(FORWARD, stage, index) for index in range(min(left, microbatches))]
    for index in range(microbatches):
        order.append(Action(BACKWARD, stage, index))
        if index + left < microbatches:
            order.append(Action(FORWARD, stage, index + left))
    return tuple(order)


_SIMPLE = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
"""Own orders: torch 2.13 lists none for its GPipe, and its 1F1B order is wrong on all ranks but the first."""


def order(schedule: str, arrangement: Arrangement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank along the pipe, in order.

    Args:
        schedule: A name of `nnx_nnscaler.options.SCHEDULES`.
        arrangement: The stages of each rank along the pipe.
        microbatches: The number of microbatches of a batch.

    Raises:
        OptionError: The schedule is unknown, or has no order for these stages and microbatches.
    """
    check_choice("schedule", schedule, tuple(SCHEDULES))
    ranks, stages = arrangement.ranks, arrangement.stages
    takes = schedule != "1f1b" or stages == ranks
    found = actions(schedule, ranks, stages, microbatches) if takes else None
    own = [arrangement.stages_of(rank) for rank in range(ranks)]
    if found is None or own != [sorted({action.stage for action in rank}) for rank in found]:
        raise OptionError(
            f"schedule={schedule!r} has no order for {microbatches} microbatches and {arrangement}.",
            remedy="Use 'gpipe', which takes any, or the stages and microbatches of torch's schedule.",
        )
    return found


class Span(NamedTuple):
    """An action and its time.

    Attributes:
        rank: The rank along the pipe in a prediction, or in the world in a measurement.
        action: The action.
        start: The start in seconds.
        stop: The end in seconds.
        step: The training step of the measurement, from 0.
    """

    rank: int
    action: Action
    start: float
    stop: float
    step: int = 0


def simulate(
    orders: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> list[Span]:
    """Return the time of each action, if it waits only for its rank and for the actions that it needs.

    Args:
        orders: The actions of each rank, in order.
        forward: The forward seconds of each stage for a microbatch.
        backward: The backward seconds of each stage for a microbatch; the two actions of a split backward
            take half of it each.

    Raises:
        PlanError: The ranks deadlock.
    """
    half = [seconds / 2 for seconds in backward]
    seconds = {FORWARD: forward, BACKWARD: backward, INPUTS: half, WEIGHTS: half}
    done: dict[tuple[str, int, int], float] = {}
    left = [list(actions) for actions in orders]
    free = [0.0] * len(left)
    spans: list[Span] = []
    # Each pass runs every rank as far as it can; a pass without progress is a deadlock.
    while any(left):
        before = len(spans)
        for rank, waiting in enumerate(left):
            while waiting and (start := _ready(waiting[0], done, len(forward))) is not None:
                action = waiting.pop(0)
                begun = max(free[rank], start)
                free[rank] = begun + seconds[action.kind][action.stage]
                done[_result(action)] = free[rank]
                spans.append(Span(rank, action, begun, free[rank]))
        if len(spans) == before:
            first = next(actions[0] for actions in left if actions)
            raise PlanError(
                f"the schedule comes to a standstill before {NAMES[first.kind]} of stage {first.stage}, "
                f"microbatch {first.microbatch}.",
                remedy="Order the actions that it needs before it.",
            )
    return spans


def _result(action: Action) -> tuple[str, int, int]:
    """Return the key of an action's result."""
    # Other stages wait for gradients of inputs, which a split and a complete backward both give.
    kind, stage, index = action
    return BACKWARD if kind == INPUTS else kind, stage, index


def _ready(action: Action, done: Mapping[tuple[str, int, int], float], stages: int) -> float | None:
    """Return the time at which all needed actions are done; None if one has not run yet."""
    kind, stage, index = action
    needed = []
    if kind == FORWARD and stage > 0:
        needed.append((FORWARD, stage - 1, index))
    if kind in (BACKWARD, INPUTS):
        needed.append((FORWARD, stage, index))
        if stage < stages - 1:
            needed.append((BACKWARD, stage + 1, index))
    if kind == WEIGHTS:
        needed.append((BACKWARD, stage, index))
    if not all(other in done for other in needed):
        return None
    return max((done[other] for other in needed), default=0.0)


def waiting_share(spans: Sequence[Span]) -> float:
    """Return the share of the time in which the rank with the most work waits."""
    busy: dict[int, float] = {}
    for span in spans:
        busy[span.rank] = busy.get(span.rank, 0.0) + span.stop - span.start
    return max(0.0, 1 - max(busy.values()) / max(span.stop for span in spans))


@lru_cache(maxsize=256)
def held(
    schedule: str, arrangement: Arrangement, microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return for each rank the largest numbers of microbatches whose activations it holds at once, by stage.

    A rank with several stages has several answers: all counts that no other exceeds in every stage.

    Example:
        >>> held("1f1b", Arrangement(2, 2), 8), held("gpipe", Arrangement(2, 2), 8)
        ((((2,),), ((1,),)), (((8,),), ((8,),)))
        >>> held("gpipe", Arrangement(2, 4, v_shaped=True), 3)
        (((3, 3),), ((3, 3),))
    """
    # GPipe holds all microbatches in any arrangement.
    if schedule == "gpipe":
        each = arrangement.stages // arrangement.ranks
        return (((microbatches,) * each,),) * arrangement.ranks
    orders = actions(schedule, arrangement.ranks, arrangement.stages, microbatches)
    assert orders is not None, "the schedule was chosen for so many"
    found = []
    for rank, order in enumerate(orders):
        now = dict.fromkeys(arrangement.stages_of(rank), 0)
        seen: set[tuple[int, ...]] = set()
        for kind, stage, _ in order:
            if kind == FORWARD:
                now[stage] += 1
                seen.add(tuple(now.values()))
            # A split backward frees activations only with the gradients of weights.
            elif kind != INPUTS:
                now[stage] -= 1
        most = [
            one
            for one in seen
            if not any(one != other and all(map(int.__le__, one, other)) for other in seen)
        ]
        found.append(tuple(sorted(most)))
    return tuple(found)
