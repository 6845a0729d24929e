"""Compile a module's programs by the strategy's options: trace, plan, and store.

`backend` imports it only if there is something to plan, because it imports the tracer, the planner and the
code generator, which data parallelism does not need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nnx_base.ranks import control_group, together
from nnx_core._torch_compat import FakeTensor, tree_map
from nnx_core.backend import ParallelContext, Sample, first_call
from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import PlanError
from nnx_core.machine.calibration import calibrated
from nnx_nnscaler.axes import Axes, with_pipe
from nnx_nnscaler.compile.compiler import Compiled, Compiler, FixedLayout, ModelCall, Planner, code_digest
from nnx_nnscaler.compile.programs import Programs
from nnx_nnscaler.compile.store import Store
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.options import PIPELINES, V_SHAPED, NnScalerOptions
from nnx_nnscaler.pipeline.picture import Timeline
from nnx_nnscaler.pipeline.program import PipelineForm, in_a_row, source_of
from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
from nnx_nnscaler.pipeline.training_step import StepForm, Steps, TrainingStep, goes_in_turns, layout_for
from nnx_nnscaler.pipeline.with_stages import with_stages
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.pipeline_plan import AnyPlan, PipelinePlan
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.schedules import Arrangement
from nnx_nnscaler.plan_file import Plan
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.runtime.storage import Arrival
from nnx_nnscaler.self_check import checked_if_small, checked_up_to
from nnx_nnscaler.trace.forward import plain_parameters

_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_SHARE_OF_DEVICE = 0.8
"""The share of a CUDA device's memory for a plan, by default; unplanned tensors need the rest."""


def make_programs(
    module: nn.Module,
    sample: Sample,
    *,
    axes: Axes,
    context: ParallelContext,
    options: NnScalerOptions,
    local: Callable[[], AbstractContextManager[Any]],
    arrival: Arrival,
    loss_scale: Callable[[], float | None],
    timeline: Timeline | None,
) -> tuple[Programs, Steps | None, Axes]:
    """Compile the first program of a module. Collective.

    If its forward cannot be traced, there is no program, and every call falls back to eager. Programs of
    training steps are compiled in the first step.

    Args:
        module: The module, equal on all ranks and not sharded yet. It may still be on its way to the device.
        sample: The example inputs.
        axes: This rank's process groups.
        context: The facts about this rank.
        options: The options of the strategy.
        local: The context around programs.
        arrival: The transfer of the module to the device, which runs here only if a trace needs it.
        loss_scale: A function that returns the factor of the loss, see `Runtime`.
        timeline: The recorder of this rank's actions; None for no measurement.

    Returns:
        The programs, the programs of steps, and the axes, with those of a planned pipeline.

    Raises:
        PlanError: No plan fits, or the ranks' modules differ.
        UnsupportedError: There are no example inputs.
    """
    root, call = _first_call(module, sample, context)
    costs = _costs(axes, context, options)
    planned = _Planned(axes, options)
    runtime = Runtime(GroupCommunicator(axes.unit), context.device, loss_scale)
    programs = Programs(
        root,
        compiler=_compiler(root, options, planned, context.device, costs, timeline),
        runtime=runtime,
        device=context.device,
        unit=axes.unit_control,
        world=control_group(),
        local=local,
        speaks=axes.unit_rank == 0,
    )
    with _autocast(context), _naming_the_planned_module(module, root):
        compiled = programs.prepare(call, bring=arrival.finish)
    if compiled is not None and context.rank == 0:
        programs.summary = _summary(compiled, axes)
        _save_plan(compiled, options, axes, costs)
    steps = None
    if compiled is not None and goes_in_turns(compiled.program):
        steps = _steps(module, programs, planned, runtime, options, costs, local, timeline)
    return programs, steps, planned.axes


def _first_call(module: nn.Module, sample: Sample, context: ParallelContext) -> tuple[nn.Module, ModelCall]:
    """Return the module that a step calls first, and its inputs. Collective."""
    with (
        together(control_group(), doing="looking for example inputs"),
        _autocast(context),
        plain_parameters(module, context.device),
    ):
        call = first_call(module, sample)
        return call.module, ModelCall(*tree_map(_with_values, (call.args, call.kwargs)))


@contextmanager
def _naming_the_planned_module(module: nn.Module, root: nn.Module) -> Iterator[None]:
    """Name the planned submodule in the error, if no plan is found for it."""
    try:
        yield
    except PlanError as error:
        if root is not module:
            name = next(name for name, part in module.named_modules() if part is root)
            error.add(
                f"The plan covers {name!r}, which the step of {type(module).__name__} calls first. To "
                "plan all of it, let the step call one module that calls the others."
            )
        raise


def _costs(axes: Axes, context: ParallelContext, options: NnScalerOptions) -> CostModel:
    """Return the cost model. Collective."""
    communicator = GroupCommunicator(axes.unit)
    return CostModel(
        hardware=calibrated(communicator, context.device, group=control_group()),
        master_bytes=4 if options.fp32_masters else 0,
        recompute=tuple(options.recompute or ()),
    )


def _save_plan(compiled: Compiled, options: NnScalerOptions, axes: Axes, costs: CostModel) -> None:
    if options.save_plan is not None:
        zero = axes.part_size > 1
        document = Plan.of(compiled.graph, compiled.plan, costs=costs, units=axes.outer_size, zero=zero)
        document.save(options.save_plan)


def _steps(
    module: nn.Module,
    forwards: Programs,
    planned: _Planned,
    runtime: Runtime,
    options: NnScalerOptions,
    costs: CostModel,
    local: Callable[[], AbstractContextManager[Any]],
    timeline: Timeline | None,
) -> Steps | None:
    """Return the programs of the module's training steps; None if it has no such method."""
    if not hasattr(type(module), "training_step"):
        return None
    root = TrainingStep(module, forwards)
    prefix, layout = layout_for(root, forwards)
    name = f"{type(module).__module__}.{type(module).__qualname__}.training_step"
    compiler = _compiler(module, options, planned, runtime.device, costs, timeline)
    memory_limit = _memory_limit(options, runtime.device)
    compiler = replace(
        compiler,
        form=StepForm(_planner(options, planned, costs, memory_limit, prefix), planned.take, timeline),
        store=Store(options.gen_savedir, owner=name, instance=options.instance_name),
        recompute=tuple(prefix + name for name in options.recompute or ()),
        strict=True,
    )
    return Steps(
        Programs(
            root,
            compiler=compiler,
            runtime=runtime,
            device=runtime.device,
            unit=planned.axes.unit_control,
            local=local,
            speaks=planned.axes.unit_rank == 0,
            layout=layout,
            otherwise=f"training_step of {type(module).__name__} falls back to eager, around its stages",
        )
    )


class _Planned:
    """The first plan's decisions for the following plans.

    Attributes:
        axes: This rank's groups, with those of the pipeline after a plan with one.
        pipeline: The requested stages, microbatches and schedule; None for no stages.
    """

    def __init__(self, axes: Axes, options: NnScalerOptions) -> None:
        self.axes = axes
        self.pipeline = _pipeline(options, axes) if options.policy in PIPELINES else None
        self._is_settled = self.pipeline is not None and options.load_plan is None

    def take(self, plan: PipelinePlan) -> Axes:
        """Return the axes with those of the pipeline. Collective the first time."""
        self.axes = with_pipe(self.axes, plan.arrangement.ranks)
        if not self._is_settled:  # the first plan decides the schedule and the microbatches of all
            self._is_settled, inner = True, plan.stages[0].size
            self.pipeline = PipelineOptions(
                plan.arrangement, plan.microbatches, inner=inner, schedule=plan.schedule
            )
        return self.axes


def _with_values(leaf: Any) -> Any:
    """Replace an argument that a step computed from parameters without values by zeros of its shape."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _autocast(context: ParallelContext) -> AbstractContextManager[Any]:
    """Return the autocast context of steps, because traced code may read it."""
    dtype = _MIXED.get(context.precision)
    return nullcontext() if dtype is None else torch.autocast(context.device.type, dtype=dtype)


def _summary(compiled: Compiled, axes: Axes) -> str:
    """Return the plan, and the path of its code, as one clause."""
    plan = compiled.plan
    if isinstance(plan, PipelinePlan):
        where = f"; the code is {compiled.path}" if compiled.path is not None else ""
        return f"policy {plan.policy!r}: {plan.reason}{where}"
    parts = sum(placement.is_shard for placement in plan.stored.values())
    why = f" ({plan.reason})" if plan.reason else ""
    where = f"; the code is {compiled.path}" if compiled.path is not None else ""
    return (
        f"policy {plan.policy!r}{why}, {axes.outer_size} "
        f"plan {'unit' if axes.outer_size == 1 else 'units'} of {plan.size} ranks that read one batch, "
        f"{parts} of {len(plan.stored)} parameters sharded{where}"
    )


def _compiler(
    root: nn.Module,
    options: NnScalerOptions,
    planned: _Planned,
    device: torch.device,
    costs: CostModel,
    timeline: Timeline | None = None,
) -> Compiler:
    cls = type(root)
    policy, axes = options.policy, planned.axes
    memory_limit = _memory_limit(options, device)
    identity = {
        "policy": policy if isinstance(policy, str) else code_digest(policy),
        "units": axes.outer_size,
        "use_zero": axes.part_size > 1,
        "device": device.type,
        "machine": f"{costs.hardware.name}, figures {costs.hardware.digest}",
        "memory_limit": memory_limit,
        "constraints": dict(options.constraints or {}),
        "pipeline": repr((options.pp_size, planned.pipeline)),
        "load_plan": _content(options.load_plan),
        "compute_config": {key: repr(value) for key, value in options.config.as_dict().items()},
    }
    return Compiler(
        form=PipelineForm(_planner(options, planned, costs, memory_limit), planned.take, timeline),
        size=axes.unit_size,
        identity=identity,
        store=Store(
            options.gen_savedir, owner=f"{cls.__module__}.{cls.__qualname__}", instance=options.instance_name
        ),
        reuse=options.reuse,
        fixed_batch=options.config.constant_folding,
        recompute=tuple(options.recompute or ()),
        needs_first=policy in PIPELINES,  # its plan decides what each rank stores
        check=_check(options),
    )


def _content(path: str | None) -> str:
    """Return a key that changes with a file or its content."""
    if path is None or not Path(path).is_file():
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _check(options: NnScalerOptions) -> Callable[[nn.Module, Graph, AnyPlan, ModelCall], None] | None:
    """Return the check of the first program against the module's forward; of pipelines on request."""
    if options.verify is False:
        return None

    def check(root: nn.Module, graph: Graph, plan: AnyPlan, call: ModelCall) -> None:
        if not options.verify:
            if not isinstance(plan, PipelinePlan):
                checked_if_small(root, graph, plan, call)
            return
        program = None
        if isinstance(plan, PipelinePlan):
            source = source_of(graph, plan, recompute=tuple(options.recompute or ()))
            plan, program = in_a_row(graph, plan, source)
        checked_up_to(None)(root, graph, plan, call, program)

    return check


def _pipeline(options: NnScalerOptions, axes: Axes) -> PipelineOptions:
    """Return the request for a pipeline in units of this size."""
    ranks, stages = options.pipe_shape(axes.unit_size)
    return PipelineOptions(
        Arrangement(ranks, stages, options.schedule in V_SHAPED),
        options.pipeline_nmicros,
        tuple(options.stage_cuts or ()),
        inner=axes.unit_size // ranks,
        schedule=options.schedule,
    )


def _memory_limit(options: NnScalerOptions, device: torch.device) -> int | None:
    """Return the bytes that a plan may use: the option, or a share of a CUDA device's memory."""
    if options.memory_limit is not None:
        return int(options.memory_limit)
    if device.type != "cuda":
        return None
    return int(_SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory)


def _planner(
    options: NnScalerOptions, planned: _Planned, costs: CostModel, memory_limit: int | None, prefix: str = ""
) -> Planner:
    """Return the planner: of one program for all ranks of a unit, or of a pipeline.

    Names of submodules have a prefix in the planned graphs.
    """
    axes, policy = planned.axes, options.policy
    given: dict[str, Any] = {
        "costs": costs,
        "constraints": {prefix + name: value for name, value in (options.constraints or {}).items()},
        "memory_limit": memory_limit,
        "units": axes.outer_size,
        "zero": axes.part_size > 1,
    }

    def plan(graph: Graph, layout: FixedLayout | None) -> AnyPlan:
        if options.load_plan is not None and layout is None:
            document = Plan.load(options.load_plan)
            world_size = axes.unit_size * axes.outer_size
            document.check(graph, world_size=world_size, size=axes.unit_size, path=options.load_plan)
            return document.program
        if planned.pipeline is not None and (policy in PIPELINES or (layout and layout.homes is not None)):
            cuts = tuple(prefix + name for name in planned.pipeline.cuts)
            return plan_pipeline(graph, planned.pipeline._replace(cuts=cuts), layout=layout, **given)
        program = partial(plan_program, graph, size=axes.unit_size, policy=policy, **given)
        if layout is not None:
            return program(stored=layout.stored, synchronized=layout.synchronized)
        return (
            program() if policy != "autodist" else with_stages(graph, program, size=axes.unit_size, **given)
        )

    return plan
