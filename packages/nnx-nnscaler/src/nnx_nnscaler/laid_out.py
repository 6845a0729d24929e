"""Store the parameters of one module, and run its programs.

`LaidOut` stores them by the plan, and replaces the forward by programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nnx_base.clean_up import clean_up
from nnx_core._torch_compat import NO_BACKWARD, current_backward
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.backend import ParallelContext, Sample
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.ir.placement import Placement
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.runtime.reducer import BUCKET_BYTES
from nnx_nnscaler.runtime.storage import Arrival, Parameters
from nnx_nnscaler.shared_statistics import StatisticsOverUnits

if TYPE_CHECKING:
    from nnx_nnscaler.compile.programs import Programs
    from nnx_nnscaler.pipeline.picture import Timeline
    from nnx_nnscaler.pipeline.training_step import Steps


def _bucket_bytes(megabytes: float | None) -> int:
    return BUCKET_BYTES if megabytes is None else int(megabytes * 1024**2)


class LaidOut:
    """A sharded module. Construction shards it, in place. Collective.

    Args:
        module: The user's module.
        sample: The example inputs, needed only if units have more than one rank.
        axes: This rank's process groups.
        context: The facts about this rank.
        options: The options of the strategy.
        order: The check for reads that only some ranks make.
        loss_scale: A function that returns the factor of the loss, see `Runtime`.

    Attributes:
        parameters: The stored parameters.
        programs: The programs in place of the forward; None if every rank runs the module's own.
        steps: The programs in place of training steps; None if these run in eager mode.
        timeline: The recorder of a few steps; None for no measurement.
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
        loss_scale: Callable[[], float | None],
    ) -> None:
        self.module = module
        self.programs: Programs | None = None
        self.steps: Steps | None = None
        self.timeline: Timeline | None = None
        arrival = Arrival(module, context.device)
        if arrival.is_there or options.verify:  # the check needs values
            arrival.finish()
        stored: dict[str, Placement] = {}
        synchronized: frozenset[str] = frozenset()
        homes: dict[str, int] | None = None
        if axes.unit_size > 1:
            from nnx_nnscaler.compilation import make_programs  # only for units
            from nnx_nnscaler.pipeline.picture import Timeline

            if options.timeline_file is not None:
                self.timeline = Timeline(options.timeline_file, context.device)
            self.programs, self.steps, axes = make_programs(
                module,
                sample,
                axes=axes,
                context=context,
                options=options,
                local=self._local_mode,
                arrival=arrival,
                loss_scale=loss_scale,
                timeline=self.timeline,
            )
        if self.programs is not None:
            prefix = _prefix(module, self.programs.root)
            stored = {prefix + name: place for name, place in self.programs.layout.stored.items()}
            synchronized = frozenset(prefix + name for name in self.programs.layout.synchronized)
            if self.programs.layout.homes is not None:
                homes = {prefix + name: home for name, home in self.programs.layout.homes.items()}
        self.parameters = Parameters(
            module,
            axes if homes is None else axes.within_stage,
            stored=stored,
            synchronized=synchronized,
            bucket_bytes=_bucket_bytes(options.config.reducer_bucket_cap_mb),
            order=order,
            arrival=arrival,
            homes=homes,
        )
        arrival.finish()  # brings submodules without parameters
        for programs in (self.programs, self.steps.programs if self.steps is not None else None):
            if programs is not None:
                weights = _Weights(programs.root, self.parameters.unit_local)
                programs.attach(weights, arrive=order.arrive)
        self._statistics = StatisticsOverUnits(module, axes)

    def undo(self, at_end: Callable[..., Tensor]) -> None:
        """Restore the module's own forward, and the parameters that this rank keeps. Collective.

        Args:
            at_end: `Backend.at_end`, which decides what this rank keeps.
        """
        self._statistics.undo()
        if self.programs is not None:
            self.programs.detach()
        if self.timeline is not None:
            self.timeline.finish()
        self.parameters.give_back(at_end)

    def _local_mode(self) -> AbstractContextManager[None]:
        return self.parameters.local_mode()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, or its program, and return its result."""
        if self.steps is None or kwargs:
            return step(*args, **kwargs)
        return self.steps.run(step, args)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that runs one step and then frees the tensors gathered for it.

        It first ends a backward that failed earlier, if somebody caught its error.
        """
        if current_backward() == NO_BACKWARD:
            self.parameters.reducer.recover()
        if self.timeline is not None and torch.is_grad_enabled():
            self.timeline.begin_step()
        with clean_up("freeing gathered weights", self.parameters.end_step):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that accumulates gradients on this rank."""
        reducer = self.parameters.reducer
        before, reducer.synchronize = reducer.synchronize, False
        try:
            yield
        finally:
            reducer.synchronize = before


class _Weights(Mapping[str, Tensor]):
    """This rank's shard of every parameter, and every buffer, by name; looked up at each use."""

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
    """Return the prefix of a submodule's parameter names in the module."""
    name = next(name for name, submodule in module.named_modules() if submodule is called)
    return f"{name}." if name else ""
