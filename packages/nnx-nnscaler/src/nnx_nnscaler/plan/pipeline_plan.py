"""The plan of a pipeline, as data and as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nnx_nnscaler.ir.placement import Placement, Strategy
from nnx_nnscaler.ir.program_plan import Prediction, ProgramPlan, plan_from_text, plan_to_text
from nnx_nnscaler.plan.schedules import FORWARD_SHARE, Arrangement, Span, order, simulate


class Usage(NamedTuple):
    """The predicted bytes of one rank.

    Attributes:
        states: The bytes of its parameters, gradients and optimizer state.
        peak: The peak of all its bytes.
    """

    states: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The plan of one graph for the ranks of a unit as pipeline stages.

    Attributes:
        size: The number of ranks of the unit.
        policy: The name of the policy.
        arrangement: The stages of each rank along the pipe.
        cuts: The cut points at which the second and later stages begin.
        stages: The plan of every stage, for the ranks that compute it together.
        seconds: The predicted time of every stage for the traced batch, forward and backward.
        usage: The predicted bytes of every rank along the pipe.
        homes: The rank along the pipe that stores each parameter, by fully qualified name.
        stored: The placement of each parameter over the ranks of its stage.
        synchronized: The parameters whose gradients the reducer sums over the ranks of a stage.
        divisible: The sizes of a microbatch that must be multiples of a number, as ``(expression, number)``.
            A batch is split into fewer microbatches, down to one, until they are.
        schedule: The pipeline schedule, a name of `nnx_nnscaler.options.SCHEDULES`.
        loss: The value that is the forward's loss, if the schedule needs it.
        microbatches: The largest number of microbatches of a batch.
        reason: The reason for this plan.
        notes: Sentences for the user, logged once.
    """

    size: int
    policy: str
    arrangement: Arrangement
    cuts: tuple[int, ...]
    stages: tuple[ProgramPlan, ...]
    seconds: tuple[float, ...]
    homes: Mapping[str, int]
    stored: Mapping[str, Placement]
    usage: tuple[Usage, ...] = ()
    synchronized: frozenset[str] = frozenset()
    divisible: tuple[tuple[str, int], ...] = ()
    schedule: str = "gpipe"
    loss: str = ""
    microbatches: int = 1
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def choices(self) -> Mapping[str, Strategy]:
        """The strategy of every operator by name, in all stages."""
        return {name: one for stage in self.stages for name, one in stage.choices.items()}

    @property
    def prediction(self) -> Prediction:
        """The seconds of a step with its bubble, and the bytes of the rank with the highest peak."""
        # The slowest stage sets the pace of all, so every rank counts as if its stages took as long.
        work = max(self.seconds) * self.arrangement.stages / self.arrangement.ranks
        memory = max((used.peak for used in self.usage), default=0)
        return Prediction(compute=work / (1 - self.bubble), memory=memory)

    @property
    def bubble(self) -> float:
        """The share of the time in which the slowest stage's rank waits, under GPipe or 1F1B."""
        waiting = self.arrangement.ranks - 1
        return waiting / (waiting + self.microbatches * self.arrangement.stages / self.arrangement.ranks)


def predicted(plan: PipelinePlan, schedule: str) -> list[Span]:
    """Return the predicted time span of each action; the forward takes a third of a stage's time.

    Raises:
        OptionError: The schedule is unknown, or does not run so many microbatches.
    """
    per_microbatch = [seconds / plan.microbatches for seconds in plan.seconds]
    forward = [seconds * FORWARD_SHARE for seconds in per_microbatch]
    backward = [seconds * (1 - FORWARD_SHARE) for seconds in per_microbatch]
    return simulate(order(schedule, plan.arrangement, plan.microbatches), forward, backward)


AnyPlan = ProgramPlan | PipelinePlan


def any_plan_to_text(plan: AnyPlan) -> str:
    """Return a plan of either kind as JSON text."""
    if isinstance(plan, ProgramPlan):
        return plan_to_text(plan)
    head = {
        "size": plan.size,
        "policy": plan.policy,
        "arrangement": plan.arrangement._asdict(),
        "cuts": plan.cuts,
        "seconds": plan.seconds,
        "usage": [one._asdict() for one in plan.usage],
        "schedule": plan.schedule,
        "loss": plan.loss,
        "microbatches": plan.microbatches,
        "reason": plan.reason,
        "notes": plan.notes,
        "divisible": plan.divisible,
        "synchronized": sorted(plan.synchronized),
        "homes": dict(plan.homes),
        "stored": {name: str(placement) for name, placement in plan.stored.items()},
        "stages": [json.loads(plan_to_text(stage)) for stage in plan.stages],
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def any_plan_from_text(text: str) -> AnyPlan:
    """Read a plan that `any_plan_to_text` wrote."""
    return pipeline_plan_from_text(text) if "stages" in json.loads(text) else plan_from_text(text)


def pipeline_plan_from_text(text: str) -> PipelinePlan:
    """Read the plan of a pipeline that `any_plan_to_text` wrote."""
    read = json.loads(text)
    return PipelinePlan(
        size=read["size"],
        policy=read["policy"],
        arrangement=Arrangement(**read["arrangement"]),
        cuts=tuple(read["cuts"]),
        stages=tuple(plan_from_text(json.dumps(stage)) for stage in read["stages"]),
        seconds=tuple(read["seconds"]),
        usage=tuple(Usage(**one) for one in read["usage"]),
        homes=read["homes"],
        stored={name: Placement.parse(text) for name, text in read["stored"].items()},
        synchronized=frozenset(read["synchronized"]),
        divisible=tuple((expression, number) for expression, number in read["divisible"]),
        schedule=read["schedule"],
        loss=read["loss"],
        microbatches=read["microbatches"],
        reason=read["reason"],
        notes=tuple(read["notes"]),
    )
