"""The plan for a world that is not here: sizes, activations and tiers, without memory and without processes.

A model of any size is built on the meta device and run once without memory; everything else is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nnx_colossalai.plan.document import PlanDocument, plan_table
from nnx_colossalai.plan.kept import Probe, probe
from nnx_colossalai.plan.model import doubtful_units, left_with_the_root, model_spec, optimizer_state, widths
from nnx_colossalai.plan.planner import Planned, plan
from nnx_colossalai.plan.spec import ModelSpec, RankResources, Rates, Wishes
from nnx_colossalai.plan.timeline import draw_timeline
from nnx_colossalai.plan.units import FoundUnit, find_units, waste


@dataclass(frozen=True, slots=True)
class DryRun:
    """The outcome; ``str`` of it is the table.

    Attributes:
        spec: The model.
        resources: The budgets and rates of each rank.
        planned: The plan.
        probe: The measurement of what a step keeps and computes.
        waste: Share of elements that sharding adds.
        notes: Remarks on what was guessed, or could not be counted.
    """

    spec: ModelSpec
    resources: RankResources
    planned: Planned
    probe: Probe
    waste: float
    notes: tuple[str, ...] = ()

    @property
    def document(self) -> PlanDocument:
        """The plan, to be saved and used where that world is."""
        return PlanDocument.of(self.spec, self.resources, self.planned)

    def draw(self, path: str | Path) -> None:
        """Draw the memory over one step to a PNG file."""
        ranks = self.spec.world_size
        draw_timeline(self.planned.memory, self.resources, path, title=f"one of {ranks} ranks, as planned")

    def __str__(self) -> str:
        table = plan_table(self.spec, self.resources, self.planned)
        added = f"sharding adds {self.waste:.3%} to the elements"
        return "\n".join([table, added, *(f"note: {note}" for note in self.notes)])


def dry_run(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[Any] | None,
    *,
    world_size: int,
    device_bytes: int,
    host_bytes: int = 2**40,
    precision: str | int = "bf16-mixed",
    optimizer: Optimizer | type[Optimizer] | int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    input_kwargs: Mapping[str, Any] | None = None,
    wishes: Wishes | None = None,
    rates: Rates | None = None,
    policy: object = None,
    min_numel: int | None = None,
    max_numel: int | None = None,
) -> DryRun:
    """Plan a model for ranks that are not here.

    Args:
        module: The model, or a function that builds it, which is called for the meta device.
        inputs: Positional arguments of one rank's forward. Tensors may be on the meta device. None leaves
            activations out, and embeddings and heads with the root: nobody saw who uses their weights.
        world_size: Ranks of that world.
        device_bytes: The budget of each rank's device, in bytes.
        host_bytes: The budget of each rank's part of the host, in bytes.
        precision: Lightning's precision string.
        optimizer: Class, instance, or bytes of state per trained element; None is Adam.
        loss: The loss function of the forward's output; what it keeps is counted too.
        input_kwargs: Keyword arguments of the forward.
        wishes: The constraints that the plan keeps to.
        rates: The rates of those ranks; by default those of a common accelerator, which nobody measured.
        policy: See `find_units`, as are the next two.
        min_numel: Smallest unit.
        max_numel: Largest unit.

    Raises:
        PlanError: Nothing fits.

    Example:
        >>> build = lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
        >>> outcome = dry_run(build, [torch.empty(1, 4096)], world_size=8, device_bytes=400 * 2**20)
        >>> outcome.planned.memory.device <= 400 * 2**20, outcome.waste
        (True, 0.0)
    """
    root = module if isinstance(module, nn.Module) else _built(module)
    find = partial(find_units, root, policy=policy, min_numel=min_numel, max_numel=max_numel)
    units, found = _units_and_probe(
        find,
        partial(_probe, inputs=inputs, kwargs=input_kwargs, loss=loss, precision=precision),
        partial(doubtful_units, root, policy=policy, least=min_numel, most=max_numel),
    )
    rates = rates or Rates()
    spec = model_spec(
        units, world_size=world_size, precision=precision, optimizer=optimizer, probe=found, flops=rates.flops
    )
    there = RankResources(device_bytes=device_bytes, host_bytes=host_bytes, **asdict(rates))
    state = "" if isinstance(optimizer, int) else optimizer_state(optimizer).note
    notes = tuple(note for note in (found.note, state) if note)
    return DryRun(spec, there, plan(spec, there, wishes), found, waste(units, world_size=world_size), notes)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _units_and_probe(
    find: Callable[..., tuple[FoundUnit, ...]],
    look: Callable[[Sequence[FoundUnit]], Probe],
    doubtful: Callable[[Sequence[FoundUnit]], dict[str, bool]],
) -> tuple[tuple[FoundUnit, ...], Probe]:
    """The units, less those whose weights others use or may use, and what a step of them keeps."""
    units = find()
    found = look(units)
    if left := left_with_the_root(found, doubtful(units)):
        units = find(leave=left)
        found = look(units)
    return units, found


def _probe(
    units: Sequence[FoundUnit],
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    precision: str | int,
) -> Probe:
    if inputs is None:
        return Probe(note="activations are not counted: no inputs were given")
    root, kinds = units[-1].module, widths(precision)

    def step(*args: Any, **keywords: Any) -> Any:
        output = root(*args, **keywords)
        return output if loss is None else loss(output)

    return probe(units, step, inputs, kwargs, working=kinds.working, mixed=kinds.mixed)
