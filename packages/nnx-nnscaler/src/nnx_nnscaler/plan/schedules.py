"""Which rank along a pipe works on which stage and microbatch, in what order and, by what stages take, when.

An `Arrangement` says which rank has which stages, `actions` what a rank does one after another: the orders
are those of `torch.distributed.pipelining`. `simulate` says when, if a message takes no time, and `held` how
many activations a rank has at a time. Nothing runs here.
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
"""The kinds of actions, as the user reads them."""
FORWARD_SHARE = 1 / 3
"""Of the time that a stage takes: for each product of matrices there are two more in the backward pass."""


class Arrangement(NamedTuple):
    """Which rank along the pipe has which stage.

    Attributes:
        ranks: Ranks along the pipe.
        stages: Stages, a multiple of the ranks.
        v_shaped: True if the ranks' second stages are in reverse order, so that the first has the last one.
    """

    ranks: int
    stages: int
    v_shaped: bool = False

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage.

        Example:
            >>> [Arrangement(2, 4).rank_of(stage) for stage in range(4)]
            [0, 1, 0, 1]
            >>> [Arrangement(2, 4, v_shaped=True).rank_of(stage) for stage in range(4)]
            [0, 1, 1, 0]
        """
        loop, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and loop % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


class Action(NamedTuple):
    """The next action of a rank.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` backward, or of that ``"I"`` gradients of inputs, ``"W"`` of weights.
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
    """Return each rank's actions, in order; None if the schedule does not take that many microbatches.

    Args:
        schedule: A name of `nnx_nnscaler.options.SCHEDULES`.
        ranks: Ranks along the pipe.
        stages: Stages of all ranks.
        microbatches: Microbatches.

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
    except (ValueError, AssertionError):
        return None
    return tuple(tuple(Action(*action) for action in rank) for rank in found)


def _gpipe(left: int, own: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """All forward, then all back."""
    each = range(microbatches)
    there = [Action(FORWARD, stage, index) for stage in own for index in each]
    return (*there, *(Action(BACKWARD, stage, index) for _, stage, index in reversed(there)))


def _one_forward_one_backward(left: int, own: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """As many forward as there are stages from here, then one back and one forward in turns."""
    (stage,) = own
    order = [Action(FORWARD, stage, index) for index in range(min(left, microbatches))]
    for index in range(microbatches):
        order.append(Action(BACKWARD, stage, index))
        if index + left < microbatches:
            order.append(Action(FORWARD, stage, index + left))
    return tuple(order)


_SIMPLE = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
"""Torch 2.13 lists no order for its GPipe, and one for its 1F1B that is wrong on all ranks but the first."""


def order(schedule: str, arrangement: Arrangement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank along the pipe, in order.

    Args:
        schedule: A name of `nnx_nnscaler.options.SCHEDULES`.
        arrangement: The stages of each rank along the pipe.
        microbatches: The number of microbatches of a batch.

    Raises:
        OptionError: There is no such schedule, or none for these stages and microbatches.
    """
    check_choice("schedule", schedule, tuple(SCHEDULES))
    ranks, stages = arrangement.ranks, arrangement.stages
    takes = schedule != "1f1b" or stages == ranks
    found = actions(schedule, ranks, stages, microbatches) if takes else None
    own = [arrangement.stages_of(rank) for rank in range(ranks)]
    if found is None or own != [sorted({action.stage for action in rank}) for rank in found]:
        raise OptionError(
            f"schedule={schedule!r} has no order for {microbatches} microbatches and {arrangement}.",
            remedy="'gpipe' takes any; others take stages and microbatches as torch's schedules do.",
        )
    return found


class Span(NamedTuple):
    """An action and its time.

    Attributes:
        rank: The rank: along the pipe where it is predicted, in the world where it was measured.
        action: The action.
        start: When it begins, in seconds.
        stop: When it is done.
        step: The training step, from 0, in which it was measured.
    """

    rank: int
    action: Action
    start: float
    stop: float
    step: int = 0


def simulate(
    orders: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> list[Span]:
    """When each action runs, if it waits for nothing but the rank and the action that it follows from.

    Args:
        orders: The actions of each rank, one after another.
        forward: Seconds of each stage for a microbatch.
        backward: Seconds of each stage for the gradients of a microbatch: half for those of inputs, and half
            for those of weights, where a schedule takes them apart.

    Raises:
        PlanError: The ranks would wait for each other for ever.
    """
    half = [seconds / 2 for seconds in backward]
    seconds = {FORWARD: forward, BACKWARD: backward, INPUTS: half, WEIGHTS: half}
    done: dict[tuple[str, int, int], float] = {}
    left = [list(actions) for actions in orders]
    free = [0.0] * len(left)
    spans: list[Span] = []
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
                remedy="Let what it follows from come first.",
            )
    return spans


def _result(action: Action) -> tuple[str, int, int]:
    """Return the awaited action: it is the same if gradients of weights are computed at once or later."""
    kind, stage, index = action
    return BACKWARD if kind == INPUTS else kind, stage, index


def _ready(action: Action, done: Mapping[tuple[str, int, int], float], stages: int) -> float | None:
    """When what an action follows from is done; None before that is known."""
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
    """The share of the time in which the rank with the most work waits."""
    busy: dict[int, float] = {}
    for span in spans:
        busy[span.rank] = busy.get(span.rank, 0.0) + span.stop - span.start
    return max(0.0, 1 - max(busy.values()) / max(span.stop for span in spans))


@lru_cache(maxsize=256)
def held(
    schedule: str, arrangement: Arrangement, microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank, of how many microbatches it holds activations of each of its stages at the same time.

    There are several answers for a rank with several stages: those that none exceeds in all stages.

    Example:
        >>> held("1f1b", Arrangement(2, 2), 8), held("gpipe", Arrangement(2, 2), 8)
        ((((2,),), ((1,),)), (((8,),), ((8,),)))
        >>> held("gpipe", Arrangement(2, 4, v_shaped=True), 3)
        (((3, 3),), ((3, 3),))
    """
    if schedule == "gpipe":  # whatever stages a rank has
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
            elif kind != INPUTS:  # until the gradients of weights are there as well
                now[stage] -= 1
        most = [
            one
            for one in seen
            if not any(one != other and all(map(int.__le__, one, other)) for other in seen)
        ]
        found.append(tuple(sorted(most)))
    return tuple(found)
