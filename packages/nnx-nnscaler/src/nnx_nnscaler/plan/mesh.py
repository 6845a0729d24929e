"""Plan two mesh dims at once: the ranks of a unit, and ZeRO over the units.

Every unit works on its own batch, so plans are compared by their time divided by the number of units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nnx_core.errors import PlanError
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.policies import Policy, StrategiesOf

_LARGEST_UNIT = 128


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A plan for all ranks.

    Attributes:
        units: The number of units.
        zero: True if they shard parameters, gradients and optimizer state.
        program: The plan inside of a unit.
    """

    units: int
    zero: bool
    program: ProgramPlan

    @property
    def seconds_per_batch(self) -> float:
        """The predicted time of a step, divided by its batches: one for each unit."""
        return self.program.prediction.time / self.units


@dataclass(frozen=True, slots=True)
class MeshSearch:
    """The result of a mesh search.

    Attributes:
        best: The plan with the least time for one batch.
        tried: Every plan that fits, in order of the search.
        refused: The error of every other mesh shape, by ``(ranks of a unit, zero)``.
    """

    best: MeshPlan
    tried: Sequence[MeshPlan]
    refused: Mapping[tuple[int, bool], str]


def plan_mesh(
    graph: Graph,
    *,
    world_size: int,
    policy: str | Policy = "autodist",
    costs: CostModel | None = None,
    sizes: Iterable[int] | None = None,
    zero: Iterable[bool] = (False, True),
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    strategies_of: StrategiesOf | None = None,
) -> MeshSearch:
    """Choose the mesh shape by planning for each one. No process of the world has to exist.

    Args:
        graph: The forward for the batch of one unit.
        world_size: The number of all ranks.
        policy: The policy of `plan_program`.
        costs: The costs of `plan_program`; the profile should have figures for links across nodes.
        sizes: The unit sizes to try; by default the powers of two up to 128 that divide the world.
        zero: The values of ZeRO to try: off, on, or both.
        constraints: The constraints of `plan_program`.
        memory_limit: The bytes of each rank; by default those of the hardware profile, if it has any.
        strategies_of: The strategies of `plan_program`.

    Raises:
        PlanError: A size does not divide the world, or no plan fits into the memory.
    """
    costs = costs or CostModel()
    limit = memory_limit or costs.hardware.memory or None
    tried: list[MeshPlan] = []
    refused: dict[tuple[int, bool], str] = {}
    for size in _sizes(world_size, policy, sizes):
        for parts in zero:
            units = world_size // size
            # One unit has no other to shard with.
            if parts and units == 1:
                continue
            try:
                program = plan_program(
                    graph, size=size, policy=policy, costs=costs, constraints=constraints,
                    memory_limit=limit, units=units, zero=parts, strategies_of=strategies_of,
                )  # fmt: skip
            except PlanError as error:
                refused[size, parts] = str(error)
                continue
            tried.append(MeshPlan(units, parts, program))
    if not tried:
        raise PlanError(
            f"no shape of a mesh of {world_size} ranks has a plan: "
            + " ".join(dict.fromkeys(refused.values())),
            remedy="Use more ranks, activation checkpointing (recompute) or a smaller batch.",
        )
    return MeshSearch(min(tried, key=lambda plan: plan.seconds_per_batch), tuple(tried), refused)


def _sizes(world_size: int, policy: str | Policy, sizes: Iterable[int] | None) -> list[int]:
    if sizes is None:
        # Policy 'dp' refuses larger units, in which all ranks would compute the same.
        if policy == "dp":
            return [1]
        powers = [2**power for power in range(_LARGEST_UNIT.bit_length())]
        return [size for size in powers if world_size % size == 0]
    sizes = list(sizes)
    for size in sizes:
        if size < 1 or world_size % size:
            raise PlanError(
                f"units of {size} ranks do not divide a world of {world_size}.",
                remedy="Choose divisors of the world size.",
            )
    return sizes
