"""From the strategy's options to a module's programs: what is traced, how it is planned, where it is kept.

Imported by `parallel_module` only where there is something to plan: it brings the tracer, the planner and the
code generator along, which data parallelism does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from nnx_checkpoint.collective import control_group, together
from nnx_core.backend import ParallelContext, Sample, first_call
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.codegen.self_check import checked_if_small, checked_up_to
from nnx_nnscaler.codegen.store import Store
from nnx_nnscaler.compiler import (
    Compiled,
    Compiler,
    FixedLayout,
    ModelCall,
    Planner,
    ProgramForm,
    code_digest,
)
from nnx_nnscaler.cost.hardware import calibrated
from nnx_nnscaler.cost.model import CostModel
from nnx_nnscaler.ir import Graph
from nnx_nnscaler.options import V_SHAPED, NnScalerOptions
from nnx_nnscaler.pipeline.plan import PipelinePlan
from nnx_nnscaler.pipeline.planning import PipelineOptions, plan_pipeline
from nnx_nnscaler.pipeline.program import PipelineForm
from nnx_nnscaler.pipeline.stages import Arrangement
from nnx_nnscaler.plan.document import Plan
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.program_plan import ProgramPlan
from nnx_nnscaler.programs import Programs
from nnx_nnscaler.runtime.arrival import Arrival
from nnx_nnscaler.runtime.collectives import GroupCommunicator
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.trace.forward import plain_parameters

_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_SHARE_OF_DEVICE = 0.8
"""Of a CUDA device's memory, what a plan may take unless told; the rest is for what is not planned."""


def make_programs(
    module: nn.Module,
    sample: Sample,
    *,
    axes: Axes,
    context: ParallelContext,
    options: NnScalerOptions,
    local: Callable[[], AbstractContextManager[Any]],
    arrival: Arrival,
) -> Programs:
    """Compile the first program of a module. Collective.

    Where its forward cannot be traced the programs hold none, and every call runs whole.

    Args:
        module: The same on all ranks, and not in parts yet; it may be on its way to the device.
        sample: Example inputs.
        axes: This rank's groups.
        context: This rank.
        options: The strategy's.
        local: The context that programs run in.
        arrival: Brings the module to the device, which is done here only if it can be traced no other way.

    Raises:
        PlanError: No plan fits, or the ranks' modules differ.
        UnsupportedError: There are no example inputs.
    """
    with (
        together(control_group(), doing="looking for example inputs"),
        _autocast(context),
        plain_parameters(module, context.device),
    ):
        call = first_call(module, sample)
        arguments = tree_map(_with_values, (call.args, call.kwargs))
    communicator = GroupCommunicator(axes.unit)
    hardware = calibrated(communicator, context.device, group=control_group())
    costs = CostModel(
        hardware=hardware,
        master_bytes=4 if options.fp32_masters else 0,
        recompute=tuple(options.recompute or ()),
    )
    programs = Programs(
        call.module,
        compiler=_compiler(call.module, options, axes, context.device, costs),
        runtime=Runtime(GroupCommunicator(axes.within_stage.unit), context.device),
        device=context.device,
        unit=axes.unit_control,
        world=control_group(),
        local=local,
        speaks=axes.unit_rank == 0,
    )
    with _autocast(context):
        compiled = programs.prepare(ModelCall(*arguments), bring=arrival.finish)
    if compiled is not None and context.rank == 0:
        programs.summary = _summary(compiled, axes)
        if options.save_plan is not None and isinstance(compiled.plan, ProgramPlan):
            zero = axes.part_size > 1
            document = Plan.of(compiled.graph, compiled.plan, costs=costs, units=axes.outer_size, zero=zero)
            document.save(options.save_plan)
    return programs


def _with_values(leaf: Any) -> Any:
    """An argument that a step made of parameters without values: zeros of its shape."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _autocast(context: ParallelContext) -> AbstractContextManager[Any]:
    """The autocast that steps will run in, because code may ask for it."""
    dtype = _MIXED.get(context.precision)
    return nullcontext() if dtype is None else torch.autocast(context.device.type, dtype=dtype)


def _summary(compiled: Compiled, axes: Axes) -> str:
    """The plan, and where its code is, as one clause."""
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
        f"{parts} of {len(plan.stored)} parameters stored in parts{where}"
    )


def _compiler(
    root: nn.Module, options: NnScalerOptions, axes: Axes, device: torch.device, costs: CostModel
) -> Compiler:
    cls = type(root)
    policy = options.policy
    memory_limit = _memory_limit(options, device)
    identity = {
        "policy": policy if isinstance(policy, str) else code_digest(policy),
        "units": axes.outer_size,
        "use_zero": axes.part_size > 1,
        "device": device.type,
        "machine": f"{costs.hardware.name}, figures {costs.hardware.digest}",
        "memory_limit": memory_limit,
        "constraints": dict(options.constraints or {}),
        "pipeline": repr(_pipeline(options, axes)),
        "compute_config": {key: repr(value) for key, value in options.config.as_dict().items()},
    }
    return Compiler(
        form=_form(options, axes, costs, memory_limit),
        size=axes.unit_size,
        identity=identity,
        store=Store(
            options.gen_savedir, owner=f"{cls.__module__}.{cls.__qualname__}", instance=options.instance_name
        ),
        reuse=options.reuse,
        fixed_batch=options.config.constant_folding,
        recompute=tuple(options.recompute or ()),
        check=None if axes.pipe_size > 1 else _CHECKS[options.verify],
    )


_CHECKS = {None: checked_if_small, True: checked_up_to(None), False: None}


def _pipeline(options: NnScalerOptions, axes: Axes) -> PipelineOptions:
    """What is asked of a pipeline in units of this size."""
    ranks, stages = options.pipe_shape(axes.unit_size)
    return PipelineOptions(
        Arrangement(ranks, stages, options.schedule in V_SHAPED),
        options.pipeline_nmicros,
        tuple(options.stage_cuts or ()),
        inner=axes.unit_size // ranks,
        schedule=options.schedule,
    )


def _form(options: NnScalerOptions, axes: Axes, costs: CostModel, memory_limit: int | None) -> ProgramForm:
    """What a unit runs: one program for all of its ranks, or a pipeline."""
    if axes.pipe is None:
        return ProgramForm(_planner(options, axes, costs, memory_limit))

    def plan(graph: Graph, layout: FixedLayout | None) -> PipelinePlan:
        return plan_pipeline(
            graph,
            _pipeline(options, axes),
            costs=costs,
            layout=layout,
            constraints=options.constraints,
            memory_limit=memory_limit,
            units=axes.outer_size,
            zero=axes.part_size > 1,
        )

    return PipelineForm(plan, axes.pipe)


def _memory_limit(options: NnScalerOptions, device: torch.device) -> int | None:
    """Bytes that a plan may take: as asked for, or what most of a CUDA device has."""
    if options.memory_limit is not None:
        return int(options.memory_limit)
    if device.type != "cuda":
        return None
    return int(_SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory)


def _planner(options: NnScalerOptions, axes: Axes, costs: CostModel, memory_limit: int | None) -> Planner:
    def plan(graph: Graph, layout: FixedLayout | None) -> ProgramPlan:
        if options.load_plan is not None and layout is None:
            document = Plan.load(options.load_plan)
            document.check(graph, world_size=axes.unit_size * axes.outer_size, path=options.load_plan)
            return document.program
        return plan_program(
            graph,
            size=axes.unit_size,
            policy=options.policy,
            costs=costs,
            stored=None if layout is None else layout.stored,
            synchronized=None if layout is None else layout.synchronized,
            constraints=options.constraints,
            memory_limit=memory_limit,
            units=axes.outer_size,
            zero=axes.part_size > 1,
        )

    return plan
