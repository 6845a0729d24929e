"""The backend of the colossalai strategies: models in chunks, each chunk in the memory of its tier.

`ColossalAIBackend` implements the interface of the core and repeats steps that run out of device memory.
`model` builds one chunked model, and `plan` chooses the tiers of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.reading.state import ModelState
from nnx_colossalai.device import Device, HostDevice
from nnx_colossalai.loss_scale import DynamicLossScaler, LossScaleRule
from nnx_colossalai.model import ChunkedModel
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.retry import Retrying
from nnx_core._torch_compat import tree_map_only
from nnx_core.backend import ParallelContext, Sample
from nnx_core.errors import UnsupportedError
from nnx_core.parts_backend import PartsBackend, View
from nnx_core.view.hidden_optimizer_state import StateParts

__all__ = [
    "ColossalAIBackend",
]


T = TypeVar("T")


class ColossalAIBackend(PartsBackend[ColossalAIOptions]):
    """Holds models in chunks, on the device or in host memory, by a plan.

    Between steps the user's module has its masters, which optimizers, checkpoints and callbacks see.
    """

    Options = ColossalAIOptions

    def __init__(self, options: ColossalAIOptions) -> None:
        super().__init__(options)
        self._models: dict[nn.Module, ChunkedModel] = {}
        self._owners: dict[Optimizer, ChunkedModel] = {}
        self._retrying: Retrying | None = None
        self._device: Device[Any] | None = None

    def setup(self, context: ParallelContext) -> None:
        """Make the device of this rank, or use the one that the user passed."""
        super().setup(context)
        self._device = self._make_device(context)
        if self._is_limited(self._device):
            self._retrying = Retrying(self._device, context.world_size)

    def _is_limited(self, device: Device[Any]) -> bool:
        """Return True if the device may run out of memory: always, except for the host without a budget."""
        return not isinstance(device, HostDevice) or self.options.device_memory is not None

    def _make_device(self, context: ParallelContext) -> Device[Any]:
        given = self.options.device
        if isinstance(given, Device):
            return given
        if given is not None:
            return given(context)
        return make_device(context, capacity=self.options.device_bytes)

    @property
    def device(self) -> Device[Any]:
        """The device of this rank, which allocates chunks and counts copied bytes; `setup` sets it."""
        assert self._device is not None
        return self._device

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Find the chunks of a module, plan their tiers, and place them."""
        if module in self._models:
            return {}
        self._refuse_what_another_model_has(module)
        model = self._models[module] = ChunkedModel(
            module,
            sample,
            context=self.context,
            device=self.device,
            options=self.options,
            before=[other.placing.planned.memory for other in self._models.values()],
        )
        return model.replaced

    def summary(self, module: nn.Module) -> str:
        """Return the number of chunks; the log has the plan as a table."""
        count = len(self._models[module].placing.found)
        return f"{count} {'chunk' if count == 1 else 'chunks'}, placed by the plan above"

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Set up optimizers, and move chunks if the size of their state changes the plan.

        Raises:
            UnsupportedError: An optimizer also holds parameters of another model.
        """
        model = self._models[module]
        for optimizer in optimizers:
            self._refuse_what_steps_others(optimizer, module)
        self._owners.update(dict.fromkeys(optimizers, model))
        model.setup_optimizers(optimizers)
        super().setup_optimizers(module, optimizers)

    def _refuse_what_another_model_has(self, module: nn.Module) -> None:
        """Raise an error if another model, or its optimizer, holds parameters of this module."""
        own = set(module.parameters())
        for other in self._models:
            if not own.isdisjoint(other.parameters()):
                raise UnsupportedError(
                    f"{type(module).__name__} and {type(other).__name__}, which was set up before, share "
                    "parameters, and a parameter belongs to one chunk only.",
                    remedy="Set up one module that holds both.",
                )
        for optimizer in self._owners:
            if not own.isdisjoint(_parameters_of(optimizer)):
                raise _steps_several(optimizer)

    def _refuse_what_steps_others(self, optimizer: Optimizer, module: nn.Module) -> None:
        held = set(_parameters_of(optimizer))
        if any(not held.isdisjoint(other.parameters()) for other in self._models if other is not module):
            raise _steps_several(optimizer)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Restore the module's unsharded masters as plain parameters, and free its chunks."""
        model = self._models.pop(module, None)
        if model is None:
            return {}
        model.finish()
        self._states.remove()
        self._owners = {optimizer: owner for optimizer, owner in self._owners.items() if owner is not model}
        model.engine.at_end = self.at_end
        return model.undo()

    def teardown(self) -> None:
        """Close the device, unless the user passed it."""
        self._retrying = None
        if self._device is not None and not isinstance(self.options.device, Device):
            self._device.close()
        self._device = None

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step with working weights; repeat it in lower tiers if device memory runs out."""
        model = self._models.get(module)
        if model is None:
            return step(*args, **kwargs)
        model.begin_step()
        model.engine.is_watched = self.is_watched
        run: Callable[[], T] = lambda: model.engine.run_step(module, step, *args, **kwargs)  # noqa: E731
        result = run() if self._retrying is None else self._retrying.forward(model, run)
        return tree_map_only(Tensor, _as_float32, result) if self.options.force_outputs_fp32 else result

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Keep gradients on this rank until the first backward outside of the context."""
        with ExitStack() as stack:
            for root, model in self._of(module):
                stack.enter_context(model.engine.no_sync(root))
            yield

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; repeat forward and backward in lower tiers if device memory runs out."""
        run = partial(super().backward, module, loss, *args, **kwargs)
        with ExitStack() as stack:
            for _, model in self._of(module):
                stack.enter_context(model.engine.backward_pass())
            if self._retrying is None:
                run()
            else:
                self._retrying.backward([model for _, model in self._of(module)], loss, run)

    def _of(self, module: nn.Module) -> list[tuple[nn.Module, ChunkedModel]]:
        """Return the chunked models of a module: its own, or those of its children, as Fabric passes them."""
        modules = [module] if module in self._models else list(module.children())
        return [(root, self._models[root]) for root in modules if root in self._models]

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler | None:
        """Return the dynamic loss scale of the options for Lightning's scaler; keep the user's own scaler."""
        if isinstance(default, DynamicLossScaler) or not _is_as_made_by_lightning(default):
            return super().grad_scaler(default)
        options = self.options
        rule = LossScaleRule(
            initial_scale=options.initial_scale,
            min_scale=options.min_scale,
            max_scale=options.max_scale,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
            hysteresis=options.hysteresis,
        )
        return DynamicLossScaler(self, rule, enabled=default.is_enabled())

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run an optimizer's step over the masters, at once or in the background."""
        owner = self._owners.get(optimizer)
        if owner is None:
            return step(*args, **kwargs)
        if not args and kwargs.get("closure") is None:
            # A forward without a backward has left working weights, which hooks of the step would see.
            owner.engine.end_step()
        return super().optimizer_step(optimizer, step, *args, **kwargs)

    def step_shards(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step the masters chunk by chunk, in the background if possible."""
        if self._owner_ranks.serves(optimizer):
            step = partial(self._owner_ranks.step, optimizer, step)
        return self._owners[optimizer].stepper.step(optimizer, step, *args, **kwargs)

    def state_parts(self, module: nn.Module) -> StateParts | None:
        """Return an object that shows user code unsharded optimizer state, above one rank."""
        return self._models[module].engine.state_parts(self.state_refusal)

    def state_refusal(self, optimizer: Optimizer) -> str | None:
        """Return the reason of the core, after all pending steps: user code must read stepped state."""
        self._finish()
        return super().state_refusal(optimizer)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Context manager for work on masters and optimizer state; it begins after all pending steps."""
        self._finish()
        yield

    def views(self, optimizer: Optimizer) -> Iterable[View]:
        """Return the parameters of which this rank holds shards."""
        owner = self._owners.get(optimizer)
        return () if owner is None else owner.engine.views()

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of user code's writes into sharded weights, by name."""
        model = self._models.get(module)
        return {} if model is None else model.engine.written(module)

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on the masters, after all pending steps."""
        self._finish()
        return super().model_state(module)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refresh the working weights from the loaded masters."""
        for _, model in self._of(module):
            model.refresh()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank zero's buffers; the evaluation that follows refreshes the working weights."""
        super().sync_buffers(module)
        for _, model in self._of(module):
            model.distrust()

    def _finish(self) -> None:
        for model in self._models.values():
            model.finish()


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _steps_several(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} holds parameters of several models that are set up one by one.",
        remedy="Use an optimizer for each model, or set up one module that holds them all.",
    )


def _as_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _is_as_made_by_lightning(scaler: torch.amp.GradScaler) -> bool:
    """Return True if a scaler has torch's default settings, so the user has chosen none."""
    plain = torch.amp.GradScaler("cpu")
    settings = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval")
    return type(scaler) is torch.amp.GradScaler and (
        not scaler.is_enabled() or all(getattr(scaler, name)() == getattr(plain, name)() for name in settings)
    )


def make_device(context: ParallelContext, *, capacity: int | None = None) -> Device[Any]:
    """Return the device of a rank.

    Args:
        context: The rank of this process and the world size.
        capacity: The bytes that the rank may use; None for all memory of the host, or most of a GPU's.

    Raises:
        UnsupportedError: Chunks do not support this kind of device.
    """
    kind = context.device.type
    if kind == "cpu":
        return HostDevice(capacity, local_world_size=context.local_world_size)
    if kind == "cuda":
        from nnx_colossalai.cuda import CudaDevice

        return CudaDevice(context.device, capacity, world_size=context.world_size)
    raise UnsupportedError(
        f"colossalai cannot hold chunks on device {str(context.device)!r}.",
        remedy="Train with accelerator='cpu' or accelerator='cuda'.",
    )
