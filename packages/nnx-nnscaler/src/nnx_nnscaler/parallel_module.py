"""One module on this rank: its parameters stored as planned, its forward replaced by programs.

It owns the order in which a module is laid out and put back. Where parts lie is `runtime.storage`'s
business, which program a call gets that of `programs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nnx_checkpoint.collective import control_group, together
from nnx_core.backend import ParallelContext, Sample, first_call
from nnx_core.materialize import broadcast_module, materialize, move_to
from nnx_core.used import CollectiveOrder
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.codegen.self_check import checked_if_small, checked_up_to
from nnx_nnscaler.codegen.store import Store
from nnx_nnscaler.cost.hardware import calibrated
from nnx_nnscaler.cost.model import CostModel
from nnx_nnscaler.ir import Graph
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.placement import Placement
from nnx_nnscaler.plan.document import Plan
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.program_plan import ProgramPlan
from nnx_nnscaler.programs import Compiled, Compiler, FixedLayout, ModelCall, Planner, Programs, code_digest
from nnx_nnscaler.runtime.communicator import GroupCommunicator
from nnx_nnscaler.runtime.reducer import BUCKET_BYTES
from nnx_nnscaler.runtime.runtime import Runtime
from nnx_nnscaler.runtime.storage import Parameters

if TYPE_CHECKING:
    from nnx_nnscaler.programs import Programs

__all__ = ["LaidOut", "make_programs"]


_MIB = 1024**2
_NOT_IN_BACKWARD = -1


class LaidOut:
    """A module that is laid out. Making it does so, in place. Collective.

    Args:
        module: The user's module.
        sample: Example inputs; asked for only where units have more than one rank.
        axes: This rank's groups.
        context: This rank.
        options: The strategy's.
        order: Notices what only some ranks read.

    Attributes:
        parameters: The parameters as they are stored.
        programs: The programs that run in place of the forward; None where every rank runs the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Sample,
        *,
        axes: Axes,
        context: ParallelContext,
        options: NnScalerOptions,
        order: CollectiveOrder,
    ) -> None:
        self.module = module
        self.programs: Programs | None = None
        materialize(module, context.device, name="")
        move_to(module, context.device)
        broadcast_module(module)
        stored: dict[str, Placement] = {}
        synchronized: frozenset[str] = frozenset()
        if axes.unit_size > 1:
            from nnx_nnscaler.parallel_module import make_programs  # without units nothing is traced

            self.programs = make_programs(
                module, sample, axes=axes, context=context, options=options, local=self._local_mode
            )
        if self.programs is not None:
            prefix = _prefix(module, self.programs.root)
            stored = {prefix + name: place for name, place in self.programs.layout.stored.items()}
            synchronized = frozenset(prefix + name for name in self.programs.layout.synchronized)
        cap = options.config.reducer_bucket_cap_mb
        self.parameters = Parameters(
            module,
            axes,
            stored=stored,
            synchronized=synchronized,
            bucket_bytes=BUCKET_BYTES if cap is None else int(cap * _MIB),
            order=order,
        )
        if self.programs is not None:
            self.programs.attach(_Weights(self.programs.root, self.parameters.unit_local))

    def undo(self) -> None:
        """Give the module its whole parameters and its own forward back. Collective."""
        if self.programs is not None:
            self.programs.detach()
        self.parameters.give_back()

    def _local_mode(self) -> AbstractContextManager[None]:
        return self.parameters.local_mode()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step: what was gathered for it is freed.

        A backward that failed before, and whose error somebody caught, is ended first.
        """
        if torch._C._current_graph_task_id() == _NOT_IN_BACKWARD:
            self.parameters.reducer.recover()
        try:
            yield
        finally:
            self.parameters.end_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients stay on this rank."""
        reducer = self.parameters.reducer
        before, reducer.synchronize = reducer.synchronize, False
        try:
            yield
        finally:
            reducer.synchronize = before


class _Weights(Mapping[str, Tensor]):
    """This rank's part of every parameter, and every buffer, by name; looked up at each use."""

    def __init__(self, root: nn.Module, unit_local: Callable[[Tensor], Tensor]) -> None:
        self._unit_local = unit_local
        self._places: dict[str, tuple[dict[str, Any], str, bool]] = {}
        for prefix, module in root.named_modules(remove_duplicate=False):
            for held, is_parameter in ((module._parameters, True), (module._buffers, False)):
                for name in held:
                    self._places[f"{prefix}.{name}" if prefix else name] = held, name, is_parameter

    def __getitem__(self, name: str) -> Tensor:
        held, key, is_parameter = self._places[name]
        tensor: Tensor | None = held[key]
        if tensor is None:
            raise KeyError(name)
        return self._unit_local(tensor) if is_parameter else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _prefix(module: nn.Module, called: nn.Module) -> str:
    """What the names of a submodule's parameters begin with in the module."""
    name = next(name for name, submodule in module.named_modules() if submodule is called)
    return f"{name}." if name else ""


# --- planned ---------------------------------------------------------------------------------------------
#
# From the strategy's options to a module's programs: what is traced, how it is planned, where it is kept.


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
) -> Programs:
    """Compile the first program of a module. Collective.

    Where its forward cannot be traced the programs hold none, and every call runs whole.

    Args:
        module: Whole, and the same on all ranks.
        sample: Example inputs.
        axes: This rank's groups.
        context: This rank.
        options: The strategy's.
        local: The context that programs run in.

    Raises:
        PlanError: No plan fits, or the ranks' modules differ.
        UnsupportedError: There are no example inputs.
    """
    with together(control_group(), doing="looking for example inputs"), _autocast(context):
        call = first_call(module, sample)
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
        runtime=Runtime(communicator, context.device),
        device=context.device,
        unit=axes.unit_control,
        world=control_group(),
        local=local,
    )
    with _autocast(context):
        compiled = programs.prepare(ModelCall(call.args, call.kwargs))
    if compiled is not None and context.rank == 0:
        programs.summary = _summary(compiled, axes)
        if options.save_plan is not None:
            zero = axes.part_size > 1
            document = Plan.of(compiled.graph, compiled.plan, costs=costs, units=axes.outer_size, zero=zero)
            document.save(options.save_plan)
    return programs


def _autocast(context: ParallelContext) -> AbstractContextManager[Any]:
    """The autocast that steps will run in, because code may ask for it."""
    dtype = _MIXED.get(context.precision)
    return nullcontext() if dtype is None else torch.autocast(context.device.type, dtype=dtype)


def _summary(compiled: Compiled, axes: Axes) -> str:
    """The plan, and where its code is, as one clause."""
    plan = compiled.plan
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
    identity = {
        "policy": policy if isinstance(policy, str) else code_digest(policy),
        "units": axes.outer_size,
        "use_zero": axes.part_size > 1,
        "memory_limit": options.memory_limit,
        "constraints": dict(options.constraints or {}),
        "compute_config": {key: repr(value) for key, value in options.config.as_dict().items()},
    }
    return Compiler(
        planner=_planner(options, axes, costs, _memory_limit(options, device)),
        size=axes.unit_size,
        identity=identity,
        store=Store(
            options.gen_savedir, owner=f"{cls.__module__}.{cls.__qualname__}", instance=options.instance_name
        ),
        reuse=options.reuse,
        fixed_batch=options.config.constant_folding,
        recompute=tuple(options.recompute or ()),
        check={None: checked_if_small, True: checked_up_to(None), False: None}[options.verify],
    )


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
