"""Fabric's side: Lightning Fabric's `Strategy` interface on top of a `Backend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.state import repoint_optimizer
from nnx_checkpoint.writer import poll
from nnx_core.backend import Backend
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.checkpoint import module_state_dict, restore_model
from nnx_core.lightning.fabric_checkpoint import load_fabric_checkpoint, save_fabric_checkpoint
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.routing import (
    EngineModule,
    has_own_backward,
    publishes_gradients,
    route_optimizer_steps,
    route_precision,
    unwrap_engine,
    unwrap_optimizer,
)
from nnx_core.lightning.sample import example_inputs


class _SyncControl:
    """Fabric's interface for skipping gradient synchronisation while accumulating."""

    def __init__(self) -> None:
        self.is_accumulating = False

    @contextmanager
    def no_backward_sync(self, module: EngineModule, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self.is_accumulating = True
        try:
            with module.backend.no_sync(module.module):
                yield
        finally:
            self.is_accumulating = False


class FabricAdapter(ParallelProcesses):
    """Mixin that makes a `Backend` a strategy of Fabric; combined with the tree's ``ParallelStrategy``."""

    precision: Any
    _checkpoint_io: Any

    def __init__(self, backend: Backend[Any], **kwargs: Any) -> None:
        self._modules: list[nn.Module] = []
        self._owners: dict[Optimizer, nn.Module] = {}
        self._sync_control = _SyncControl()
        super().__init__(backend, **kwargs)

    @property
    def _backward_sync_control(self) -> _SyncControl:
        return self._sync_control

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: Any) -> None:
        """Fabric's base class sets None in its constructor."""

    # --- precision ----------------------------------------------------------------------------

    def _precision_name(self) -> str:
        return str(self.precision.precision)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks; returns the norm before clipping."""
        self.precision.unscale_gradients(optimizer)
        return self.backend.clip_grad_norm(
            unwrap_optimizer(optimizer),
            float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp every gradient element into ``[-clip_val, clip_val]``."""
        self.precision.unscale_gradients(optimizer)
        self.backend.clip_grad_value(unwrap_optimizer(optimizer), float(clip_val))

    # --- set up -------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Where a module is made: on the device, or on ``meta`` when `empty_init` is asked for."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else self.root_device)
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.backend.module_init_context())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """The older name of `module_init_context`."""
        return self.backend.module_init_context()

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: `Backend.parallelize` moves the module, part by part if it must."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Lay the module out and make optimizers that were built before hold its new parameters."""
        replaced = self._parallelize(module)
        for optimizer in optimizers:
            repoint_optimizer(optimizer, replaced)
            self._owners[optimizer] = module
        self.backend.setup_optimizers(module, optimizers)
        route_optimizer_steps(optimizers, self.backend, module)
        return EngineModule(module, self.backend, self._batches), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Lay the module out; optimizers may follow in `setup_optimizer`."""
        self._parallelize(module)
        return EngineModule(module, self.backend, self._batches)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take over an optimizer over the parameters of a module that was set up before."""
        module = self._owners[optimizer] = self._owner(optimizer)
        self.backend.setup_optimizers(module, [optimizer])
        route_optimizer_steps([optimizer], self.backend, module)
        return optimizer

    def _parallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        replaced = self.backend.parallelize(module, lambda: example_inputs(module))
        route_precision(self.precision, self.backend)
        self._modules.append(module)
        self._tell(module)
        return replaced

    def _owner(self, optimizer: Optimizer) -> nn.Module:
        if optimizer in self._owners:  # from then on it may hold parameters of the engine's own
            return self._owners[optimizer]
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._modules:
            if wanted & {id(parameter) for parameter in module.parameters()}:
                return module
        raise UnsupportedError(
            f"{type(optimizer).__name__} holds no parameter of a module that was set up.",
            remedy="Call `fabric.setup_module(model)` first and build the optimizer from "
            "`model.parameters()`, or pass both to `fabric.setup(model, optimizer)`.",
        )

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; the engine gets the user's module, or all of them where Fabric names none.

        What follows is the user's own loop, which may look at them.
        """
        if module is None:
            module = self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
        module = unwrap_engine(module)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None and has_own_backward(self.backend):  # the plugin's, which scales, is replaced
            tensor = scaler.scale(tensor)
        super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc] # of the tree's
        if publishes_gradients(self.backend) and not self._sync_control.is_accumulating:
            self.backend.publish_gradients(module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, after taking notice of a background save that has ended meanwhile, and compare the ranks."""
        poll()
        result = super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc] # of the tree's Strategy
        module = self._owner(unwrap_optimizer(optimizer))
        self.watch.after_step(module, lambda: [o for o, owner in self._owners.items() if owner is module])
        return result

    # --- collectives --------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the result reaches every rank."""
        return self._reduce(tensor, group, reduce_op)

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> Any:
        """`nnx.CheckpointIO` unless the user brought another."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._own_checkpoint_io()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """This rank's shards by parameter name; handles, not copies."""
        return module_state_dict(self.backend, unwrap_engine(module))

    def get_optimizer_state(self, optimizer: Any) -> Any:
        """This rank's optimizer state by parameter name; handles, not copies."""
        raw = unwrap_optimizer(optimizer)
        return self.backend.optimizer_state(self._owner(raw), raw)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Fill this rank's part of a module in place."""
        restore_model(self.backend, unwrap_engine(module), state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write modules, optimizers and everything else in `state`, all ranks together.

        Args:
            path: Directory to write.
            state: Modules, optimizers, objects with ``state_dict``, and values, by the user's own keys.
            storage_options: Passed to a CheckpointIO that is not nnx's.
            filter: Decides, by key of `state`, which entries of its state dict to keep.
        """
        save_fabric_checkpoint(self, self.broadcast(path), state, storage_options, filter or {})

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore what `state` names in place and return the rest.

        Args:
            path: A checkpoint of any nnx strategy, of Trainer or Fabric, or a file of ``torch.save``.
            state: The same as in `save_checkpoint`; a single module or optimizer for a raw state dict; None
                returns the whole checkpoint.
            strict: Refuse keys of `state` that the checkpoint does not have.
            weights_only: Passed to ``torch.load`` for single files.
        """
        return load_fabric_checkpoint(self, self.broadcast(path), state, strict, weights_only)
