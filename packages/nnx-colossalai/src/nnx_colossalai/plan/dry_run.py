"""Plan a model for ranks that do not exist here, without memory and without processes.

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
from nnx_colossalai.plan.spec import Constraints, ModelSpec, RankResources, Rates
from nnx_colossalai.plan.timeline import draw_timeline
from nnx_colossalai.plan.units import FoundUnit, find_units, waste


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run; its ``str`` is the table of the plan.

    Attributes:
        spec: The model.
        resources: The budgets and rates of each rank.
        planned: The plan.
        probe: The measured activations and operations of a step.
        waste: The share of elements that sharding adds.
        notes: Notes on guesses and on figures that could not be counted.
    """

    spec: ModelSpec
    resources: RankResources
    planned: Planned
    probe: Probe
    waste: float
    notes: tuple[str, ...] = ()

    @property
    def document(self) -> PlanDocument:
        """The plan as a document, to be saved for the planned ranks."""
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
    constraints: Constraints | None = None,
    rates: Rates | None = None,
    policy: object = None,
    min_numel: int | None = None,
    max_numel: int | None = None,
) -> DryRun:
    """Plan a model for ranks that do not exist here.

    Args:
        module: The model, or a function that builds it, which is called under the meta device.
        inputs: The positional arguments of one rank's forward, on any device; None counts no activations.
        world_size: The number of planned ranks.
        device_bytes: The device budget of each rank, in bytes.
        host_bytes: The host budget of each rank, in bytes.
        precision: Lightning's precision string.
        optimizer: A class, an instance, or the bytes of state per trained element; None is Adam.
        loss: The loss function of the forward's output, whose activations count too.
        input_kwargs: The keyword arguments of the forward.
        constraints: The constraints of the plan.
        rates: The rates of the ranks; by default assumed ones of a common accelerator, not measured ones.
        policy: The policy of `find_units`.
        min_numel: The smallest unit.
        max_numel: The largest unit.

    Raises:
        PlanError: No plan fits.

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
    given = RankResources(device_bytes=device_bytes, host_bytes=host_bytes, **asdict(rates))
    state = "" if isinstance(optimizer, int) else optimizer_state(optimizer).note
    notes = tuple(note for note in (found.note, state) if note)
    added = waste(units, world_size=world_size)
    return DryRun(spec, given, plan(spec, given, constraints), found, added, notes)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _units_and_probe(
    find: Callable[..., tuple[FoundUnit, ...]],
    look: Callable[[Sequence[FoundUnit]], Probe],
    doubtful: Callable[[Sequence[FoundUnit]], dict[str, bool]],
) -> tuple[tuple[FoundUnit, ...], Probe]:
    """Return the units whose weights no other module uses, and the probe of a step with them."""
    units = find()
    found = look(units)
    # Activations are counted by unit, so other units need another probe.
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
