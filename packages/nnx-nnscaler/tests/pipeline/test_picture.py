"""Schedules take their theoretical time, keep their memory limits, and are drawn as they run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import nn, ones

from nnx_core.errors import NnxError, OptionError, PlanError
from nnx_nnscaler.pipeline.picture import draw
from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan
from nnx_nnscaler.plan.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Action,
    Arrangement,
    Span,
    order,
    simulate,
    waiting_share,
)
from nnx_nnscaler.trace import trace_forward

SVG = "{http://www.w3.org/2000/svg}"


def steps_of(schedule: str, arrangement: Arrangement, microbatches: int) -> list[Span]:
    """One second forward and two backward, for every stage."""
    stages = arrangement.stages
    return simulate(order(schedule, arrangement, microbatches), [1.0] * stages, [2.0] * stages)


def planned(arrangement: Arrangement, microbatches: int) -> PipelinePlan:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    graph = trace_forward(model, (ones(8, 8),), {})
    return plan_pipeline(graph, PipelineOptions(arrangement, microbatches), costs=CostModel())


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_the_time_of_all_microbatches_and_of_filling_the_pipe(
    schedule: str, ranks: int, microbatches: int
) -> None:
    steps = steps_of(schedule, Arrangement(ranks, ranks), microbatches)
    assert max(step.stop for step in steps) == 3 * (microbatches + ranks - 1)
    assert waiting_share(steps) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("arrangement", [Arrangement(2, 2), Arrangement(2, 6), Arrangement(3, 6)])
def test_the_bubble_of_a_plan_is_that_of_equal_stages(arrangement: Arrangement) -> None:
    plan = planned(arrangement, 4)
    steps = steps_of("gpipe", arrangement, plan.microbatches)
    assert waiting_share(steps) == pytest.approx(plan.bubble)


def test_the_longest_stage_and_the_way_to_it_decide() -> None:
    steps = simulate(order("gpipe", Arrangement(2, 2), 4), [1.0, 3.0], [2.0, 6.0])
    assert max(step.stop for step in steps) == 4 * (3 + 6) + 1 + 2
    assert waiting_share(steps) == pytest.approx(3 / 39)


@pytest.mark.parametrize(
    ("schedule", "arrangement"),
    [
        ("gpipe", Arrangement(3, 3)),
        ("looped_bfs", Arrangement(2, 4)),
        ("1f1b", Arrangement(3, 3)),
        ("interleaved", Arrangement(2, 4)),
        ("zero_bubble", Arrangement(2, 2)),
        ("zbv", Arrangement(2, 4, v_shaped=True)),
        ("dualpipev", Arrangement(2, 4, v_shaped=True)),
    ],
)
def test_each_rank_does_all_of_its_stages_once_and_one_thing_at_a_time(
    schedule: str, arrangement: Arrangement
) -> None:
    steps = steps_of(schedule, arrangement, 8)
    times = {step.action: step for step in steps}
    assert len(times) == len(steps)
    assert sum(step.stop - step.start for step in steps) == pytest.approx(3 * 8 * arrangement.stages)
    for rank in range(arrangement.ranks):
        own = [step for step in steps if step.rank == rank]
        assert {step.action.stage for step in own} == set(arrangement.stages_of(rank))
        assert all(one.stop <= other.start for one, other in pairwise(own))
    for (kind, stage, index), step in times.items():
        needed = [Action(FORWARD, stage, index)] if kind in (BACKWARD, INPUTS) else []
        if kind == FORWARD and stage:
            needed.append(Action(FORWARD, stage - 1, index))
        if kind in (BACKWARD, INPUTS) and stage < arrangement.stages - 1:
            later = [Action(other, stage + 1, index) for other in (BACKWARD, INPUTS)]
            needed += [action for action in later if action in times]
        if kind == WEIGHTS:
            needed.append(Action(INPUTS, stage, index))
        assert all(times[action].stop <= step.start for action in needed)


def test_taking_gradients_of_weights_later_makes_the_bubble_smaller() -> None:
    shares = [
        waiting_share(steps_of(schedule, Arrangement(4, 8, v_shaped=schedule == "zbv"), 8))
        for schedule in ("looped_bfs", "zbv")
    ]
    assert shares[1] < shares[0]


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 9), ("1f1b", 4)])
def test_one_forward_one_backward_keeps_no_more_microbatches_than_there_are_stages(
    schedule: str, most: int
) -> None:
    kept = peak = 0
    for action in order(schedule, Arrangement(4, 4), 9)[0]:
        kept += 1 if action.kind == FORWARD else -1
        peak = max(peak, kept)
    assert (kept, peak) == (0, most)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_picture_has_a_row_for_each_rank_and_a_box_for_each_action(schedule: str) -> None:
    plan = planned(Arrangement(2, 2), 4)
    root = ElementTree.fromstring(draw(plan, schedule))
    boxes = root.findall(f"{SVG}g/{SVG}g")
    assert sorted(box.attrib["class"] for box in boxes) == [BACKWARD] * 8 + [FORWARD] * 8
    assert len({box.find(f"{SVG}rect").attrib["y"] for box in boxes}) == 2  # type: ignore[union-attr]
    title = root.findtext(f"{SVG}title")
    total = (max(plan.seconds) + min(plan.seconds) / 4) * 1e3
    assert title is not None
    assert title.startswith(f"{schedule}, predicted: 2 stages on 2 ranks, 4 microbatches; {total:.3g} ms")


def test_what_was_measured_is_drawn_below_what_was_predicted(tmp_path: Path) -> None:
    plan, timeline = planned(Arrangement(2, 2), 4), tmp_path / "timeline.json"
    actions = [
        (rank, action) for rank, own in enumerate(order("1f1b", Arrangement(2, 2), 4)) for action in own
    ]
    events = [
        {"ph": "X", "pid": rank, "ts": 10.0 * index, "dur": 5.0, "args": {**action._asdict(), "step": step}}
        for step in (3, 4)
        for index, (rank, action) in enumerate(actions)
    ]
    timeline.write_text(json.dumps({"traceEvents": events}))
    predicted, below = ElementTree.fromstring(draw(plan, timeline=timeline)).findall(f"{SVG}g")
    assert len(predicted.findall(f"{SVG}g")) == len(below.findall(f"{SVG}g")) == 16
    assert below.findtext(f"{SVG}text") == "measured: step 5; 0.155 ms, of which a rank waits 74%"


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    for text, message in (("", "is not a timeline"), ('{"traceEvents": []}', "has no actions")):
        timeline.write_text(text)
        with pytest.raises(NnxError, match=message):
            draw(planned(Arrangement(2, 2), 4), timeline=timeline)


def test_what_cannot_be_drawn_is_refused() -> None:
    plan = planned(Arrangement(2, 4), 4)
    with pytest.raises(OptionError, match="'zigzag' is not allowed"):
        draw(plan, "zigzag")
    with pytest.raises(OptionError, match="'1f1b' has no order for 4 microbatches and"):
        draw(plan, "1f1b")
    with pytest.raises(OptionError, match="'zbv' has no order for 4 microbatches and"):
        draw(plan, "zbv")  # its ranks have other stages
    backward_first = [[Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0)]]
    with pytest.raises(PlanError, match="standstill before backward of stage 0, microbatch 0"):
        simulate(backward_first, [1.0], [2.0])
