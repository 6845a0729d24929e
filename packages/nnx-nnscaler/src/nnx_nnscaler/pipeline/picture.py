"""Schedules as pictures: when each rank along the pipe works on which stage and microbatch, drawn as SVG.

`order` says what the ranks do one after another, `simulate` when they do it if a message takes no time, and
`draw` shows that for a plan, and below it what a run has measured in a ``timeline_file``. `gantt` takes any
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from nnx_core.errors import OptionError, PlanError
from nnx_core.options import check_choice
from nnx_nnscaler.options import SCHEDULES
from nnx_nnscaler.pipeline.plan import PipelinePlan
from nnx_nnscaler.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, actions
from nnx_nnscaler.pipeline.stages import Arrangement
from nnx_nnscaler.pipeline.timeline import read_timeline

FORWARD_SHARE = 1 / 3
"""Of the time that a stage takes: for each product of matrices there are two more in the backward pass."""

_LEFT, _TOP, _WIDTH, _ROW, _GAP = 72, 50, 840, 34, 10
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUTS: "backward, inputs",
    WEIGHTS: "backward, weights",
}
_COLORS = {
    FORWARD: ("#bbdefb", "#64b5f6", "#1e88e5"),
    BACKWARD: ("#c8e6c9", "#81c784", "#43a047"),
    INPUTS: ("#b2dfdb", "#4db6ac", "#00897b"),
    WEIGHTS: ("#ffe0b2", "#ffb74d", "#fb8c00"),
}
"""Darker for each further stage of a rank."""
_DIGIT = 8
"""The width of a digit, and of what stands around a number."""


class Step(NamedTuple):
    """An action and its time.

    Attributes:
        rank: The rank along the pipe.
        action: The action.
        start: When it begins, in seconds.
        stop: When it is done.
    """

    rank: int
    action: Action
    start: float
    stop: float


# --- the order ------------------------------------------------------------------------------------


def order(schedule: str, arrangement: Arrangement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank along the pipe does, one action after another.

    Args:
        schedule: A name of `nnx_nnscaler.options.SCHEDULES`.
        arrangement: The stages of each rank along the pipe.
        microbatches: Into how many a batch is cut.

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


# --- the time -------------------------------------------------------------------------------------


def simulate(
    orders: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> list[Step]:
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
    steps: list[Step] = []
    while any(left):
        before = len(steps)
        for rank, waiting in enumerate(left):
            while waiting and (start := _ready(waiting[0], done, len(forward))) is not None:
                action = waiting.pop(0)
                begun = max(free[rank], start)
                free[rank] = begun + seconds[action.kind][action.stage]
                done[_result(action)] = free[rank]
                steps.append(Step(rank, action, begun, free[rank]))
        if len(steps) == before:
            first = next(actions[0] for actions in left if actions)
            raise PlanError(
                f"the schedule comes to a standstill before {_NAMES[first.kind]} of stage {first.stage}, "
                f"microbatch {first.microbatch}.",
                remedy="Let what it follows from come first.",
            )
    return steps


def _result(action: Action) -> tuple[str, int, int]:
    """What others wait for: it is the same whether gradients of weights are computed at once or later."""
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


def waiting_share(steps: Sequence[Step]) -> float:
    """The share of the time in which the rank with the most work waits."""
    busy: dict[int, float] = {}
    for step in steps:
        busy[step.rank] = busy.get(step.rank, 0.0) + step.stop - step.start
    return max(0.0, 1 - max(busy.values()) / max(step.stop for step in steps))


def predicted(plan: PipelinePlan, schedule: str) -> list[Step]:
    """When each action of a plan would run; a third of a stage's predicted time is for the forward pass.

    Raises:
        OptionError: The schedule is unknown, or does not run so many microbatches.
    """
    per_microbatch = [seconds / plan.microbatches for seconds in plan.seconds]
    forward = [seconds * FORWARD_SHARE for seconds in per_microbatch]
    backward = [seconds * (1 - FORWARD_SHARE) for seconds in per_microbatch]
    return simulate(order(schedule, plan.arrangement, plan.microbatches), forward, backward)


def measured(timeline: str | Path) -> tuple[list[Step], str]:
    """What ran in the last step of a timeline, from the time at which it began, and what to call it.

    Args:
        timeline: A file that the option ``timeline_file`` has named.

    Raises:
        NnxError: It is no such file, or nothing was measured.
    """
    spans = read_timeline(timeline)
    last = max(span.step for span in spans)
    spans = [span for span in spans if span.step == last]
    begin = min(span.start for span in spans)
    steps = [
        Step(span.rank, Action(span.kind, span.stage, span.microbatch), span.start - begin, span.stop - begin)
        for span in spans
    ]
    return steps, f"measured: step {last + 1}"


# --- the picture ----------------------------------------------------------------------------------


def draw(plan: PipelinePlan, schedule: str | None = None, *, timeline: str | Path | None = None) -> str:
    """The predicted schedule of a plan as SVG: a row for each rank, a box for each stage and microbatch.

    Args:
        plan: The plan; a third of a stage's predicted time is taken for the forward pass.
        schedule: The name of the schedule; by default the plan's own.
        timeline: A file that the option ``timeline_file`` has named: its last step is drawn below.

    Raises:
        NnxError: The schedule or the file cannot be drawn; the message says why.
    """
    schedule = schedule or plan.schedule
    steps = predicted(plan, schedule)
    stages, ranks = plan.arrangement.stages, plan.arrangement.ranks
    title = f"{schedule}, predicted: {stages} stages on {ranks} ranks, {plan.microbatches} microbatches"
    return _page([(steps, title)] if timeline is None else [(steps, title), measured(timeline)])


def gantt(steps: Sequence[Step], title: str) -> str:
    """Steps as SVG.

    Args:
        steps: The steps that ran, or are predicted; at least one.
        title: The line above the picture.
    """
    return _page([(steps, title)])


def _page(charts: Sequence[tuple[Sequence[Step], str]]) -> str:
    """Charts one below the other."""
    width, height = _LEFT + _WIDTH + 20, 0
    lines, heads = [], []
    for steps, title in charts:
        ranks, total = 1 + max(step.rank for step in steps), max(step.stop for step in steps)
        heads.append(f"{title}; {total * 1e3:.3g} ms, of which a rank waits {waiting_share(steps):.0%}")
        lines += [f'<g transform="translate(0 {height})">', *_chart(steps, heads[-1], ranks, total), "</g>"]
        height += _TOP + ranks * (_ROW + _GAP) + 36
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
        f"<title>{escape('. '.join(heads))}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def _chart(steps: Sequence[Step], head: str, ranks: int, total: float) -> list[str]:
    """A line of text, and a row for each rank."""
    stages = [sorted({step.action.stage for step in steps if step.rank == rank}) for rank in range(ranks)]
    lines = [f'<text x="{_LEFT}" y="28">{escape(head)}</text>']
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f5f5f5"/>')
    lines += [_box(step, stages[step.rank].index(step.action.stage), _WIDTH / total) for step in steps]
    kinds = {step.action.kind for step in steps}
    y = _TOP + ranks * (_ROW + _GAP) + 10
    return lines + _legend(kinds, several=max(map(len, stages)) > 1, y=y)


def _box(step: Step, loop: int, scale: float) -> str:
    """A box, with the number of its microbatch if that fits; the pointer shows the rest."""
    kind, stage, index = step.action
    x, y = _LEFT + step.start * scale, _TOP + step.rank * (_ROW + _GAP)
    width = (step.stop - step.start) * scale
    told = f"stage {stage}, microbatch {index}, {_NAMES[kind]}: "
    told += f"{step.start * 1e3:.3g} to {step.stop * 1e3:.3g} ms"
    color = _COLORS[kind][min(loop, len(_COLORS[kind]) - 1)]
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" stroke="#ffffff" fill="{color}"/>'
    if width >= _DIGIT * (len(str(index)) + 0.5):
        box += f'<text x="{x + width / 2:.2f}" y="{y + 22}" text-anchor="middle">{index}</text>'
    return f'<g class="{kind}"><title>{told}</title>{box}</g>'


def _legend(kinds: set[str], several: bool, y: int) -> list[str]:
    """What the colors mean."""
    lines, x = [], _LEFT
    for kind in [kind for kind in _NAMES if kind in kinds]:
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLORS[kind][0]}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}">{_NAMES[kind]}</text>')
        x += 50 + 8 * len(_NAMES[kind])
    if several:
        lines.append(f'<text x="{x}" y="{y + 12}">darker: a further stage of the rank</text>')
    return lines
