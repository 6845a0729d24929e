"""Build one chunked model: its units, its plan, its engine and its stepper.

`ChunkedModel` creates and removes these in order, and changes the plan between two steps. `backend` uses it
to implement the interface of the core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nnx_base.ranks import all_gather_object, control_group, is_distributed, together
from nnx_checkpoint.reading.state import repoint_optimizer
from nnx_colossalai._torch_compat import makes_cuda_graphs
from nnx_colossalai.budgets import resources
from nnx_colossalai.chunks.chunk import ChunkEngine, Unit
from nnx_colossalai.device import Device, HostDevice
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.cost import Memory
from nnx_colossalai.plan.document import PlanDocument, plan_table, size_text
from nnx_colossalai.plan.kept import Probe, probe
from nnx_colossalai.plan.model import doubtful_units, left_with_the_root, model_spec, optimizer_state, widths
from nnx_colossalai.plan.planner import Planned, downgrade, evaluate, plan, why_not_lower
from nnx_colossalai.plan.spec import Constraints, ModelSpec, RankResources, Rates, Tier
from nnx_colossalai.plan.timeline import draw_timeline
from nnx_colossalai.plan.units import FoundUnit, find_units
from nnx_colossalai.stepper import Stepper
from nnx_core.backend import ParallelContext, Sample, first_call
from nnx_core.errors import NnxError, UnsupportedError
from nnx_core.view.hidden_optimizer_state import held_state
from nnx_core.view.modules import Layers
from nnx_core.view.side_effects import IteratorAdvancedError

__all__ = [
    "ChunkedModel",
    "refuse_cuda_graphs",
    "constraints_of",
]


T = TypeVar("T")
log = logging.getLogger("nnx.colossalai")


class Placing:
    """The plan of one model, the same on all ranks. Collective.

    It plans from the options, plans again for the real optimizers, and finds a lower plan after
    out-of-memory. It moves no chunk; `ChunkedModel` does.

    Args:
        module: The model.
        sample: A function that yields example inputs. It is called only to count activations, if device
            memory is limited, or to find the weights that a module uses in its forward.
        context: The rank of this process and the world size.
        device: The device whose memory is planned.
        options: The options of the strategy.
        before: The peak memory of models planned earlier, which the budgets are reduced by.

    Attributes:
        found: The units whose parameters become chunks.
        planned: The plan, with a tier for each unit.

    Raises:
        PlanError: No plan fits the budgets, or a stored plan does not fit the model.
        OptionError: Options contradict each other or the model.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Sample,
        *,
        context: ParallelContext,
        device: Device[Any],
        options: ColossalAIOptions,
        before: Sequence[Memory] = (),
    ) -> None:
        self._context, self._device, self._options = context, device, options
        self._probe: Probe | None = None
        self._noted: set[str] = set()
        self.found = self._find(module, sample)
        with together(control_group(), doing="reading the options"):
            self._constraints = constraints_of(options, [unit.name for unit in self.found])
        self._resources = self._left_by(before, self._available())
        self.spec = self._counted(None)
        self.planned = self._on_first_rank(self._first_plan, doing="planning")
        self._report("planned")

    def units(self) -> list[Unit]:
        """Return the units with their tiers, for an engine."""
        tiers = self.planned.placement.tiers
        return [Unit(unit.name, unit.module, unit.parameters, tiers[unit.name]) for unit in self.found]

    def table(self) -> str:
        """Return the plan as text."""
        return plan_table(self.spec, self._resources, self.planned)

    def _find(self, module: nn.Module, sample: Sample) -> tuple[FoundUnit, ...]:
        """Find the units, the same on all ranks even if their samples differ. Collective."""
        with together(control_group(), doing="finding chunks"):
            least, most = self._bounds(module)
            find = partial(
                find_units,
                module,
                policy=self._options.auto_wrap_policy,
                min_numel=least,
                max_numel=most,
                by_choice=self._options.by_choice,
            )
            found = find()
            doubtful = doubtful_units(
                module, found, policy=self._options.auto_wrap_policy, least=least, most=most
            )
            if doubtful or self._is_limited:
                self._probe = self._look(found, module, sample)
        # Rank zero decides, because the probe follows this rank's sample.
        left = self._on_first_rank(lambda: left_with_the_root(self._probe, doubtful), doing="finding chunks")
        if not left:
            return found
        with together(control_group(), doing="finding chunks"):
            found = find(leave=left)
            self._probe = self._look(found, module, sample)
        return found

    def _bounds(self, module: nn.Module) -> tuple[int | None, int | None]:
        """Return the smallest and the largest number of elements of a unit."""
        options = self._options
        least, most = options.min_num_params, options.chunk_size
        if options.min_chunk_size is not None:
            least = -(-options.min_chunk_size // widths(self._context.precision).working.itemsize)
        if options.chunk_search_range is not None:
            largest = max((parameter.numel() for parameter in module.parameters()), default=0)
            most = max(least or 0, largest, 1) + options.chunk_search_range
        return least, most

    @property
    def _is_limited(self) -> bool:
        return not isinstance(self._device, HostDevice) or self._options.device_memory is not None

    def _look(self, found: Sequence[FoundUnit], module: nn.Module, sample: Sample) -> Probe:
        try:
            call = first_call(module, sample)
        except IteratorAdvancedError:
            raise
        except NnxError as error:
            return Probe(note=str(error))
        kinds = widths(self._context.precision)
        return probe(
            found,
            call.module,
            call.args,
            call.kwargs,
            device=self._device.torch_device,
            working=kinds.working,
            mixed=kinds.mixed,
        )

    def _available(self) -> RankResources:
        """Return the smallest budgets of all ranks, and the rates."""
        # Without a limit everything stays on the device, so no rate is measured.
        return resources(
            self._device,
            host_bytes=self._options.host_bytes,
            local_world_size=self._context.local_world_size,
            dtype=widths(self._context.precision).working,
            group=dist.group.WORLD if is_distributed() else None,
            rates=None if self._is_limited else Rates(),
        )

    def _left_by(self, before: Sequence[Memory], available: RankResources) -> RankResources:
        """Return the budgets that other models leave."""
        device = sum(memory.device for memory in before)
        # A measured host budget is the free memory, from which the other models' is gone already.
        host = sum(memory.host for memory in before) if self._options.host_bytes is not None else 0
        if before and self._is_limited:
            self._note(f"{size_text(device)} of device memory are planned for models set up before.")
        return replace(
            available,
            device_bytes=max(available.device_bytes - device, 0),
            host_bytes=max(available.host_bytes - host, 0),
        )

    def _counted(self, optimizers: Sequence[Optimizer] | None) -> ModelSpec:
        return model_spec(
            self.found,
            world_size=self._context.world_size,
            precision=self._context.precision,
            optimizer=optimizers,
            probe=self._probe,
            flops=self._resources.flops,
        )

    def _first_plan(self) -> Planned:
        path = self._options.plan
        if path is None:
            return plan(self.spec, self._resources, self._constraints)
        placement = PlanDocument.load(path).placement(self.spec, path=path)
        planned = evaluate(self.spec, self._resources, placement, self._constraints)
        if planned.memory.device > self._resources.device_bytes:
            log.warning(
                "Using the plan %r although it needs %s of device memory (%s are allowed).",
                path,
                size_text(planned.memory.device),
                size_text(self._resources.device_bytes),
            )
        return planned

    def correct(self, optimizers: Sequence[Optimizer]) -> bool:
        """Plan again with the real size of optimizer state; return True if chunks move. Collective."""
        if self._is_limited:
            for optimizer in optimizers:
                self._note(optimizer_state(optimizer).note)
        # Only the state's size is new. The other counts stay: parameters in chunks may be empty by now.
        spec = replace(self.spec, optimizer_bytes=self._counted(optimizers).optimizer_bytes)
        if spec == self.spec or self._options.plan is not None:
            return False
        self.spec, before = spec, self.planned
        self.planned = self._on_first_rank(
            lambda: plan(spec, self._resources, self._constraints), doing="planning"
        )
        if self.planned.placement == before.placement:
            return False
        self._report("planned again for the optimizer's state")
        return True

    def lower(self, missing: int, *, rather: int = 0) -> None:
        """Choose the next plan with less device memory. Collective.

        Args:
            missing: The least number of bytes by which to lower the peak.
            rather: The preferred number of bytes; it is halved until a plan exists.

        Raises:
            PlanError: There is no such plan; the message gives the reason.
        """
        known = self.planned, self.spec, self._resources, self._constraints

        def next_plan() -> Planned:
            wanted = max(missing, rather)
            while (found := downgrade(*known, missing=wanted)) is None:
                if wanted <= max(1, missing):
                    raise why_not_lower(*known, missing=wanted)
                wanted = max(missing, wanted // 2)
            return found

        self.planned = self._on_first_rank(next_plan, doing="planning after the device ran out of memory")

    def _on_first_rank(self, make: Callable[[], T], *, doing: str) -> T:
        """Return rank zero's result on every rank, or raise its error. Collective."""
        made: T | None = None
        group = control_group()
        with together(group, doing=doing):
            made = make() if self._context.rank == 0 else None
        first: T | None = all_gather_object(made, group)[0]
        assert first is not None
        return first

    def _report(self, what: str) -> None:
        """Log the plan, and write the files that the options name. Collective."""
        with together(control_group(), doing="writing the plan"):
            if self._context.rank == 0:
                count = len(self.found)
                log.info("%s %s %s:\n%s", count, "chunk" if count == 1 else "chunks", what, self.table())
                self._note("" if self._probe is None else self._probe.note)
                self._write()

    def _note(self, note: str) -> None:
        """Log once a fact that the plan could not count."""
        if note and self._context.rank == 0 and note not in self._noted:
            self._noted.add(note)
            log.info("The plan: %s", note)

    def _write(self) -> None:
        options = self._options
        if options.plan_file is not None:
            PlanDocument.of(self.spec, self._resources, self.planned).save(options.plan_file)
        if options.timeline_file is not None:
            draw_timeline(self.planned.memory, self._resources, options.timeline_file)


def constraints_of(options: ColossalAIOptions, names: Iterable[str]) -> Constraints:
    """Return the options of a plan, with name patterns expanded.

    Raises:
        OptionError: Two options contradict each other, or one names no chunk.

    Example:
        >>> constraints_of(ColossalAIOptions(tiers={"blocks.*": "streamed"}), ["blocks.0", ""]).tiers
        {'blocks.0': <Tier.STREAMED: 'streamed'>}
    """
    names = list(names)
    tiers: dict[str, Tier] = {}
    for pattern, tier in (options.tiers or {}).items():
        matching = [name for name in names if name == pattern or (pattern and fnmatchcase(name, pattern))]
        tiers.update(dict.fromkeys(matching or [pattern], Tier(tier)))
    policy = options.placement_policy
    if not options.enable_distributed_storage:
        policy = Tier.GATHERED.value
    return Constraints(
        policy=policy,
        offload_fraction=options.offload_fraction,
        stream_fraction=options.stream_fraction,
        gpu_margin_ratio=options.gpu_margin_mem_ratio,
        tiers=tiers,
        overlapped=options.overlap == "exact",
    )


class ChunkedModel:
    """One module in chunks, with its plan, its engine and its stepper.

    Args:
        module: The user's module.
        sample: A function that yields example inputs, to estimate activations under a budget.
        context: The rank of this process and the world size.
        device: The device that allocates and copies.
        options: The options of the strategy.
        before: The peak memory of models planned earlier, which the budgets are reduced by.

    Attributes:
        module: The user's module.
        placing: The plan of the module.
        replaced: The new parameter of each replaced one.
        engine: The engine that holds the chunks.
        stepper: The stepper of the optimizers.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Sample,
        *,
        context: ParallelContext,
        device: Device[Any],
        options: ColossalAIOptions,
        before: Sequence[Memory] = (),
    ) -> None:
        self.module, self._torch_device = module, device.torch_device
        self._recomputing = Recomputing(module, options.activation_checkpointing)
        kinds = widths(context.precision)
        dtype = kinds.working if kinds.mixed else None
        try:
            self.placing = Placing(
                module, sample, context=context, device=device, options=options, before=before
            )
            self._refuse_cuda_graphs()
            self.engine = make_engine(context, device, dtype)
            self.replaced = self.engine.parallelize(module, self.placing.units())
        # After an error the model must be as before.
        except BaseException:
            self._recomputing.undo()
            raise
        self.stepper = Stepper(
            self.engine.chunks,
            overlap=options.overlap,
            cpu_adam=options.cpu_adam,
            device=device.torch_device,
            show_masters=self.engine.end_step,
        )
        self._optimizers: Sequence[Optimizer] = ()
        self._with_gradients: bool | None = None

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Set up the optimizers, and move chunks if the size of their state changes the plan."""
        # The Trainer calls once for all optimizers, Fabric once for each.
        self._optimizers = [*dict.fromkeys([*self._optimizers, *optimizers])]
        if optimizers and self.placing.correct(self._optimizers):
            self._move()
        self.stepper.setup_optimizers(optimizers)

    def lower_tiers(self, error: DeviceMemoryError, *, rather: int = 0) -> int:
        """Move chunks to lower tiers, which need less device memory. Collective.

        Args:
            error: The out-of-memory error.
            rather: The preferred number of bytes to free, if it exceeds the error's.

        Returns:
            The bytes freed, as planned.

        Raises:
            PlanError: There is no lower plan.
            UnsupportedError: The model was compiled to CUDA graphs.
        """
        before = self.placing.planned.memory.device
        self.placing.lower(error.used + error.asked - error.allowed, rather=rather)
        self.finish()
        self._move()
        return before - self.placing.planned.memory.device

    def _refuse_cuda_graphs(self) -> None:
        if self._torch_device.type == "cuda":
            refuse_cuda_graphs(self.module, self.placing.planned.placement.tiers.values())

    def _move(self) -> None:
        self._refuse_cuda_graphs()
        before = dict(self.module.named_parameters())
        self.engine.move(self.module, self.placing.planned.placement.tiers)
        after = dict(self.module.named_parameters())
        replaced = {old: after[name] for name, old in before.items() if after[name] is not old}
        for optimizer in self._optimizers:
            repoint_optimizer(optimizer, replaced)
            move_state_to_parameters(optimizer)
        self.stepper.chunks = self.engine.chunks

    def begin_step(self) -> None:
        """Refresh working weights before a step, if callbacks may have changed masters unseen."""
        # Weight averaging writes through ``data`` between training and evaluation; no version counts that.
        with_gradients = torch.is_grad_enabled()
        if with_gradients is not self._with_gradients:
            self._with_gradients = with_gradients
            self.refresh()
        elif not with_gradients:
            self.finish()

    def distrust(self) -> None:
        """Refresh working weights before the next step, because an evaluation begins."""
        self._with_gradients = None

    def finish(self) -> None:
        """Wait for background steps and for the engine."""
        self.stepper.finish()
        self.engine.finish()

    def refresh(self) -> None:
        """Refresh the working weights from masters that were changed from outside."""
        self.finish()
        for chunk in self.engine.chunks:
            chunk.refresh()

    def undo(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Restore the module's plain parameters."""
        self.stepper.close()
        self.finish()
        replaced = self.engine.unparallelize(self.module)
        self._recomputing.undo()
        return replaced


def refuse_cuda_graphs(root: nn.Module, tiers: Iterable[Tier]) -> None:
    """Raise an error for CUDA graphs in a model with weights from host memory.

    Args:
        root: The model.
        tiers: The tiers of its chunks.

    Raises:
        UnsupportedError: A submodule is compiled to CUDA graphs, and a tier fetches weights.
    """
    # A CUDA graph reads recorded addresses, but fetched weights get a new address each time.
    compiled = [name or "the model itself" for name, one in root.named_modules() if makes_cuda_graphs(one)]
    hosted = {tier.value for tier in tiers if tier.steps_on_host}
    if compiled and hosted:
        raise UnsupportedError(
            f"{', '.join(compiled)}: compiled to CUDA graphs, which read weights at recorded addresses, "
            f"but the plan fetches weights from host memory ({', '.join(sorted(hosted))}).",
            remedy="Compile in mode 'default' or 'max-autotune-no-cudagraphs', or keep all weights on the "
            "device with placement_policy='cuda'.",
        )


def make_engine(context: ParallelContext, device: Device[Any], dtype: torch.dtype | None) -> ChunkEngine:
    """Make the engine for this number of ranks.

    Args:
        context: The rank of this process and the world size.
        device: The device that allocates and copies.
        dtype: The dtype of working weights; None keeps the masters' dtype.
    """
    if context.world_size == 1:
        from nnx_colossalai.chunks.local import LocalEngine

        return LocalEngine(context, device, dtype)
    from nnx_colossalai.chunks.sharded import ShardedEngine

    return ShardedEngine(context, device, dtype)


@torch.no_grad()
def move_state_to_parameters(optimizer: Optimizer) -> None:
    """Move every tensor of the optimizer's state to the device of its parameter.

    Args:
        optimizer: The optimizer with the present parameters and state from before the move.
    """
    held = held_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = held.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = _moved(value, parameter, group)


def _moved(value: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    here, there = _device(value), _device(parameter)
    # torch keeps step counts on the host, unless a fused or capturable kernel reads them on the device.
    counter_of_the_host = value.ndim == 0 and not (group.get("fused") or group.get("capturable"))
    if here == there or (counter_of_the_host and here.type == "cpu"):
        return value
    if value.shape != parameter.shape:
        return value.to(there)
    moved = torch.empty_like(parameter.detach(), dtype=value.dtype)
    _local(moved).copy_(_local(value))
    return moved


def _device(tensor: Tensor) -> torch.device:
    return _local(tensor).device


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Recomputing:
    """Applies activation checkpointing to chosen layers.

    Args:
        root: The model.
        classes: A layer class or several, or their names; None for no layer.

    Raises:
        OptionError: An entry of `classes` is no module class, or the model has no such layer.
    """

    def __init__(self, root: nn.Module, classes: object) -> None:
        wanted = Layers(classes, option="activation_checkpointing")
        wanted.check(root)
        self.layers = [module for module in root.modules() if module in wanted]
        # On the instance: no module name changes, and hooks, also those of chunks, are not called again.
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def undo(self) -> None:
        """Restore the layers' own forwards."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []
