"""Schedules as pictures: in which order each rank along the pipe works, when, and that drawn as SVG.

`order` says what the ranks do one after another, `simulate` when they do it if a message takes no time, and
`draw` shows that for a plan. What ran can be drawn in the same way: `gantt` takes any steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from nnx_core.errors import OptionError, PlanError
from nnx_core.options import check_choice
from nnx_nnscaler.pipeline.plan import PipelinePlan
from nnx_nnscaler.pipeline.stages import Arrangement

ORDERS = ("gpipe", "looped_bfs", "1f1b")
FORWARD_SHARE = 1 / 3
"""Of the time that a stage takes: a product of matrices has one more in the backward pass for each factor."""

_LEFT, _TOP, _WIDTH, _ROW, _GAP = 72, 50, 840, 34, 10
_DARK = 2
"""From this shade on, numbers are white."""
_COLORS = {
    "forward": ("#bbdefb", "#64b5f6", "#1e88e5", "#1565c0"),
    "backward": ("#c8e6c9", "#81c784", "#43a047", "#2e7d32"),
}
_DIGIT = 8
"""The width of a digit, and of what stands around a number."""


class Action(NamedTuple):
    """What a rank does at one time.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        stage: The stage.
        microbatch: The microbatch.
    """

    direction: str
    stage: int
    microbatch: int


class Step(NamedTuple):
    """An action and its time.

    Attributes:
        rank: The rank along the pipe.
        action: What it does.
        start: When it begins, in seconds.
        stop: When it is done.
    """

    rank: int
    action: Action
    start: float
    stop: float


# --- the order ------------------------------------------------------------------------------------


def order(schedule: str, arrangement: Arrangement, microbatches: int) -> list[list[Action]]:
    """What each rank along the pipe does, one action after another.

    Args:
        schedule: ``"gpipe"`` or ``"looped_bfs"``, which are the same, or ``"1f1b"``.
        arrangement: Which rank has which stage.
        microbatches: Into how many a batch is cut.

    Raises:
        OptionError: There is no such schedule, or it does not take several stages on a rank.

    Example:
        >>> order("gpipe", Arrangement(1, 1), 1)
        [[('forward', 0, 0), ('backward', 0, 0)]]
    """
    check_choice("schedule", schedule, ORDERS)
    if schedule != "1f1b":
        return [_all_forward(arrangement.stages_of(rank), microbatches) for rank in range(arrangement.ranks)]
    if arrangement.stages != arrangement.ranks:
        raise OptionError(
            f"schedule='1f1b' with {arrangement.stages} stages on {arrangement.ranks} ranks.",
            remedy="It has one stage on each rank: use 'gpipe', or as many stages as ranks.",
        )
    return [_one_by_one(rank, arrangement.ranks, microbatches) for rank in range(arrangement.ranks)]


def _all_forward(stages: Sequence[int], microbatches: int) -> list[Action]:
    """All forward, then all backward in the reverse order, which is autograd's."""
    pairs = [(stage, index) for stage in stages for index in range(microbatches)]
    there = [Action("forward", *pair) for pair in pairs]
    return there + [Action("backward", *pair) for pair in reversed(pairs)]


def _one_by_one(stage: int, stages: int, microbatches: int) -> list[Action]:
    """As few forward as fill the pipe, then one backward after each forward."""
    ahead = min(microbatches, stages - 1 - stage)
    actions = [Action("forward", stage, index) for index in range(ahead)]
    for index in range(microbatches):
        if ahead + index < microbatches:
            actions.append(Action("forward", stage, ahead + index))
        actions.append(Action("backward", stage, index))
    return actions


# --- the time -------------------------------------------------------------------------------------


def simulate(
    orders: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> list[Step]:
    """When each action runs, if it waits for nothing but the rank and the action that it follows from.

    Args:
        orders: What each rank does, one action after another.
        forward: Seconds of each stage for a microbatch.
        backward: Seconds of each stage for the gradients of a microbatch.

    Raises:
        PlanError: The ranks would wait for each other for ever.
    """
    seconds = {"forward": forward, "backward": backward}
    done: dict[Action, float] = {}
    left = [list(actions) for actions in orders]
    free = [0.0] * len(left)
    steps: list[Step] = []
    while any(left):
        before = len(steps)
        for rank, actions in enumerate(left):
            while actions and (start := _ready(actions[0], done, len(forward))) is not None:
                action = actions.pop(0)
                begun = max(free[rank], start)
                free[rank] = done[action] = begun + seconds[action.direction][action.stage]
                steps.append(Step(rank, action, begun, free[rank]))
        if len(steps) == before:
            waiting = next(actions[0] for actions in left if actions)
            raise PlanError(
                f"the schedule comes to a standstill before {waiting.direction} of stage {waiting.stage}, "
                f"microbatch {waiting.microbatch}.",
                remedy="Let what it follows from come first.",
            )
    return steps


def _ready(action: Action, done: Mapping[Action, float], stages: int) -> float | None:
    """When what an action follows from is done; None before that is known."""
    direction, stage, index = action
    needed = []
    if direction == "forward" and stage > 0:
        needed.append(Action("forward", stage - 1, index))
    if direction == "backward":
        needed.append(Action("forward", stage, index))
        if stage < stages - 1:
            needed.append(Action("backward", stage + 1, index))
    if not all(other in done for other in needed):
        return None
    return max((done[other] for other in needed), default=0.0)


def waiting_share(steps: Sequence[Step]) -> float:
    """The share of the time in which the rank with the most work waits."""
    busy: dict[int, float] = {}
    for step in steps:
        busy[step.rank] = busy.get(step.rank, 0.0) + step.stop - step.start
    return 1 - max(busy.values()) / max(step.stop for step in steps)


# --- the picture ----------------------------------------------------------------------------------


def draw(plan: PipelinePlan, schedule: str = "gpipe") -> str:
    """The predicted schedule of a plan as SVG: a row for each rank, a box for each stage and microbatch.

    Args:
        plan: The plan; a third of a stage's predicted time is taken for the forward pass.
        schedule: As in `order`.

    Raises:
        OptionError: As `order` does.
    """
    per_microbatch = [seconds / plan.microbatches for seconds in plan.seconds]
    forward = [seconds * FORWARD_SHARE for seconds in per_microbatch]
    backward = [seconds * (1 - FORWARD_SHARE) for seconds in per_microbatch]
    steps = simulate(order(schedule, plan.arrangement, plan.microbatches), forward, backward)
    stages, ranks = plan.arrangement.stages, plan.arrangement.ranks
    title = f"{schedule}, predicted: {stages} stages on {ranks} ranks, {plan.microbatches} microbatches"
    return gantt(steps, title=title)


def gantt(steps: Sequence[Step], *, title: str) -> str:
    """Steps as SVG.

    Args:
        steps: What ran, or would run; at least one.
        title: What stands above.
    """
    ranks = 1 + max(step.rank for step in steps)
    total = max(step.stop for step in steps)
    width, height = _LEFT + _WIDTH + 20, _TOP + ranks * (_ROW + _GAP) + 36
    stages = [sorted({step.action.stage for step in steps if step.rank == rank}) for rank in range(ranks)]
    head = f"{title}; {total * 1e3:.3g} ms, of which a rank waits {waiting_share(steps):.0%}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
        f"<title>{escape(head)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="28">{escape(head)}</text>',
    ]
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f5f5f5"/>')
    lines += [_box(step, stages[step.rank].index(step.action.stage), _WIDTH / total) for step in steps]
    return "\n".join([*lines, *_legend(max(map(len, stages)), height - 26), "</svg>"]) + "\n"


def _box(step: Step, loop: int, scale: float) -> str:
    """A box, with the number of its microbatch if that fits; the pointer shows the rest."""
    direction, stage, index = step.action
    x, y = _LEFT + step.start * scale, _TOP + step.rank * (_ROW + _GAP)
    width = (step.stop - step.start) * scale
    told = f"stage {stage}, microbatch {index}, {direction}, "
    told += f"{step.start * 1e3:.3g} to {step.stop * 1e3:.3g} ms"
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" stroke="#ffffff" '
    box += f'fill="{_color(direction, loop)}"/>'
    if width >= _DIGIT * (len(str(index)) + 0.5):
        box += f'<text x="{x + width / 2:.2f}" y="{y + 22}" text-anchor="middle" '
        box += f'fill="{"#ffffff" if loop >= _DARK else "#000000"}">{index}</text>'
    return f'<g class="{direction}"><title>{told}</title>{box}</g>'


def _color(direction: str, loop: int) -> str:
    """Darker for each further stage of a rank."""
    return _COLORS[direction][min(loop, len(_COLORS[direction]) - 1)]


def _legend(loops: int, y: int) -> list[str]:
    """What the colors mean."""
    lines, x = [], _LEFT
    for direction in _COLORS:
        for loop in range(loops):
            lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_color(direction, loop)}"/>')
            which = f", stage {loop + 1} of a rank" if loops > 1 else ""
            lines.append(f'<text x="{x + 20}" y="{y + 12}">{direction}{which}</text>')
            x += 200 if loops > 1 else 100
    return lines
