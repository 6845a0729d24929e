"""The engine behind the nnscaler strategies: shards a module over units of ranks and runs it.

It orders the steps that shard a module and restore it, and answers the core's calls. `compilation` compiles,
`programs` chooses the program of a call, and `runtime` stores and reduces the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base._torch_compat import local_mode
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.state import ModelState
from nnx_core import random_state
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.backend import ParallelContext, Sample
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.parts_backend import PartsBackend, View
from nnx_core.view.hidden_optimizer_state import StateParts
from nnx_nnscaler.axes import Axes, make_axes
from nnx_nnscaler.laid_out import LaidOut
from nnx_nnscaler.masters import Masters
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.runtime.part import Part
from nnx_nnscaler.runtime.storage import Parameters

T = TypeVar("T")

_REMEDY = (
    "Read and write weights and gradients on every rank, even if only one rank prints them, and with ZeRO "
    "call the same layers. Or use strategy 'nnscaler_dp', under which every rank holds all of them."
)


@contextmanager
def _explaining_writes() -> Iterator[None]:
    """Context manager around a step that explains a refused write to a parameter in rows."""
    try:
        yield
    except RuntimeError as error:
        if "_Rows is a view" not in str(error):
            raise
        raise UnsupportedError(
            "a function changes a trained parameter in place while it computes gradients, such as "
            "`torch.nn.functional.embedding(max_norm=)`, but each rank stores only some rows of it.",
            remedy="Change it on all ranks before the step, as in `on_train_batch_start`: "
            "`with torch.no_grad(): weight.renorm_(2.0, 0, max_norm)`.",
        ) from error


class NnScalerBackend(PartsBackend[NnScalerOptions]):
    """Splits a model over the ranks of a plan unit, and replicates units over the outer axis.

    The user's module and parameter objects stay. If a rank stores a shard, the object's data are the shard,
    and user code sees the unsharded parameter.
    """

    Options = NnScalerOptions
    own_batch = "plan_ngpus=1"

    def __init__(self, options: NnScalerOptions) -> None:
        super().__init__(options)
        self._laid_out: dict[nn.Module, LaidOut] = {}
        self._masters = Masters()
        self._random_state_may_differ = False
        self._scaler: torch.amp.GradScaler | None = None
        self.axes: Axes
        self._order: CollectiveOrder

    def setup(self, context: ParallelContext) -> None:
        """Make the process groups of units and of the outer axis."""
        super().setup(context)
        unit_size = self.options.unit_size(
            world_size=context.world_size, local_world_size=context.local_world_size
        )
        if unit_size == 1 and self.options.recompute and context.world_size > 1:
            raise OptionError(
                "recompute has no effect with units of one rank, which run the module's own forward.",
                remedy="Set plan_ngpus to 2 or more, or use torch.utils.checkpoint in the model.",
            )
        part_size = self.options.zero_size(units=context.world_size // unit_size)
        self.options.pipe_shape(unit_size)  # refuses sizes that do not fit
        self.axes = make_axes(
            rank=context.rank,
            world_size=context.world_size,
            unit_size=unit_size,
            part_size=part_size,
        )
        self._order = CollectiveOrder(remedy=_REMEDY, ranks=self.axes.reading)

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Ranks of one unit read the same data."""
        return self.axes.outer_rank, self.axes.outer_size

    def share_before_setup(
        self, *, rank: int, world_size: int, local_world_size: int
    ) -> tuple[int, int] | None:
        """Give each unit one share of the data; units are consecutive ranks, by the options."""
        unit_size = self.options.unit_size(world_size=world_size, local_world_size=local_world_size)
        return rank // unit_size, world_size // unit_size

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Compile the unit's program, and store each parameter by its plan; no object is replaced."""
        if module not in self._laid_out:
            self._share_random_state()
            self._laid_out[module] = LaidOut(
                module,
                sample,
                axes=self.axes,
                context=self.context,
                options=self.options,
                order=self._order,
                loss_scale=self._loss_scale,
            )
            self._random_state_may_differ = True
            self._order.open()
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Choose owner ranks for optimizers that cannot step on shards, and make float32 masters on request.

        Raises:
            UnsupportedError: The strategy was set up for inference only, or an optimizer calls collectives.
        """
        if optimizers and self.options.config.inference_only:
            raise UnsupportedError(
                "the strategy was set up with inference_only=True, but an optimizer needs training.",
                remedy="Leave `inference_only` out of compute_config, or call validate, test or predict.",
            )
        with local_mode():
            for optimizer in optimizers:
                self._cut_state(optimizer)
            super().setup_optimizers(module, optimizers)
        if self.options.fp32_masters:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            with local_mode():
                self._masters.add(p for group in groups for p in group["params"])

    def _cut_state(self, optimizer: Optimizer) -> None:
        """Shard the state that an optimizer made at construction, when it saw unsharded parameters."""
        for parameter, entries in optimizer.state.items():
            parameters = self._parameters_with(parameter)
            if parameters is None:
                continue
            layout = parameters.layout(cast("nn.Parameter", parameter))
            for name, value in entries.items():
                if isinstance(value, Tensor) and layout.shape == value.shape != layout.local_shape:
                    entries[name] = layout.local_part(value).clone()

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather sharded parameters, and restore the module's own forward."""
        laid_out = self._laid_out.pop(module, None)
        self._states.remove()
        if laid_out is not None:
            self._order.forget()  # from here all ranks gather the same
            laid_out.undo(self.at_end)
        self._masters.discard(module.parameters())
        return {}

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step; before the first one the ranks of a unit agree on their random state."""
        if self._random_state_may_differ:
            self._share_random_state()
        laid_out = self._laid_out.get(module)
        if laid_out is None:
            return step(*args, **kwargs)
        laid_out.parameters.is_watched = self.is_watched
        with self._order.reporting(), _explaining_writes(), laid_out.step():
            self._order.begin(getattr(step, "__name__", "a step"))
            result: T = laid_out.run(step, *args, **kwargs)
            if not torch.is_grad_enabled():
                self._order.end()
            return result

    def _share_random_state(self) -> None:
        """Give the ranks of a unit its first rank's random state: they must draw the same numbers."""
        self._random_state_may_differ = False
        if self.axes.unit is not None:
            random_state.restore(self.axes.from_first(random_state.capture()))

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate gradients on this rank until the first backward outside."""
        with ExitStack() as stack:
            for laid_out in self._of(module):
                stack.enter_context(laid_out.no_sync())
            yield

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients. A rank whose loss uses no parameter also takes part in reducing them."""
        with self._order.reporting():
            with ExitStack() as stack:
                for laid_out in self._of(module):
                    laid_out.parameters.flush()
                    stack.enter_context(laid_out.parameters.reducer.backward_pass())
                super().backward(module, loss, *args, **kwargs)
            self._order.end()

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler | None:
        """Return the core's scaler; a pipeline reads its scale for a backward before the loss is scaled."""
        self._scaler = super().grad_scaler(default)
        return self._scaler

    def _loss_scale(self) -> float | None:
        """Return the scale of the loss; None without a scaler."""
        return None if self._scaler is None else self._scaler.get_scale()

    def _of(self, module: nn.Module) -> list[LaidOut]:
        """Return the laid-out modules of the core's module: itself, or its children under Fabric."""
        modules = [module] if module in self._laid_out else list(module.children())
        return [self._laid_out[m] for m in modules if m in self._laid_out]

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return handles on the local gradients, each with the number of ranks that hold its elements."""
        for laid_out in self._laid_out.values():
            laid_out.parameters.flush()
        with local_mode():
            return [
                Gradient(parameter.grad, self._replicas(parameter))
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]

    def local(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters are this rank's shards, without communication."""
        return local_mode()

    def views(self, optimizer: Optimizer) -> list[View]:
        """Return the parameters, and their float32 master weights."""
        parameters = [laid_out.parameters for laid_out in self._laid_out.values()]
        return [*parameters, self._masters.of(optimizer)]

    def model_state(self, module: nn.Module) -> ModelState:
        """Handles on the shards, with the values that user code has written into them since the last step."""
        for laid_out in self._of(module):
            laid_out.parameters.flush()
        with local_mode():
            self._masters.take_over()
        return super().model_state(module)

    def state_parts(self, module: nn.Module) -> StateParts:
        """Return a view of the optimizer state that reads as unsharded."""
        return _PartsOfState(self._parameters_with, self.state_refusal)

    def decisions(self, module: nn.Module) -> str:
        """Return the placement of the sharded parameters, for comparison over the ranks."""
        laid_out = self._laid_out.get(module)
        programs = None if laid_out is None else laid_out.programs
        if programs is None:
            return ""
        homes = programs.layout.homes or {}
        stored = sorted(programs.layout.stored.items())
        return " ".join(f"{name} {homes.get(name, '')}{placement}" for name, placement in stored)

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of user code's writes to sharded parameters."""
        laid_out = self._laid_out.get(module)
        return {} if laid_out is None else laid_out.parameters.take_written(module)

    def summary(self, module: nn.Module) -> str:
        """Return the plan of a traced module; else the sharding of its states."""
        laid_out = self._laid_out.get(module)
        if laid_out is not None and laid_out.programs is not None:
            return laid_out.programs.summary
        if self.axes.part_size == 1:
            return "every rank holds the whole model"
        return f"parameters, gradients and optimizer state sharded over {self.axes.part_size} units"

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the shard of a tensor on this rank: of a parameter, or of state like it."""
        owner = tensor if parameter is None else parameter
        parameters = self._parameters_with(owner)
        if parameters is None or not isinstance(owner, nn.Parameter):
            return shard_of(tensor)
        with local_mode():
            if tensor is owner:
                tensor = self._masters.copies.get(owner, tensor)
            if tensor is owner:
                return parameters.shard(owner)
            return parameters.shard(tensor, parameter=owner)

    def _parameters_with(self, tensor: Tensor) -> Parameters | None:
        """Return the parameters of a parameter's module; None for any other tensor."""
        owners = (laid_out.parameters for laid_out in self._laid_out.values())
        return next((parameters for parameters in owners if parameters.knows(tensor)), None)

    def _replicas(self, parameter: nn.Parameter) -> int:
        parameters = self._parameters_with(parameter)
        return self.context.world_size if parameters is None else parameters.replicas(parameter)

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Allocate a state tensor for this rank's shard; in float32 for a float32 master."""
        with local_mode():
            if parameter in self._masters.copies and dtype == parameter.dtype:
                dtype = torch.float32
            return super().new_optimizer_state(parameter, name, shape=shape, dtype=dtype, group=group)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Copy loaded masters to the half precision parameters."""
        with local_mode():
            self._masters.publish()
        self._random_state_may_differ = True


class _PartsOfState:
    """Shows optimizer state as unsharded to user code: the `StateParts` of this engine."""

    def __init__(
        self,
        parameters_with: Callable[[Tensor], Parameters | None],
        refusal: Callable[[Optimizer], str | None],
    ) -> None:
        self._parameters_with = parameters_with
        self.refusal = refusal

    def part(self, value: Tensor, parameter: nn.Parameter, name: str) -> Part | None:
        parameters = self._parameters_with(parameter)
        return None if parameters is None else parameters.state_part(value, parameter, name)

    def own(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        parameters = self._parameters_with(parameter)
        if parameters is None or not value.ndim or parameters.is_whole(parameter):
            return value
        layout = parameters.layout(parameter)
        return layout.local_part(value).clone() if tuple(value.shape) == layout.shape else value

    def key(self, parameter: Any) -> Any:
        return parameter
