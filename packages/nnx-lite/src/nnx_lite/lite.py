"""Lite: LightningLite's class, flags and methods on today's Fabric, with every strategy that nnx knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core.errors import UnsupportedError
from nnx_core.lightning.fabric import load_fabric_checkpoint
from nnx_core.lightning.processes import leave_process_group_at_exit
from nnx_lite.checkpoint import is_plain, load_content, save_content, save_file, state_of
from nnx_lite.copies import fabric_module
from nnx_lite.flags import fabric_arguments
from nnx_lite.wrappers import unwrap, wrap_module, wrap_optimizers

if TYPE_CHECKING:
    from lightning.fabric import Fabric
else:
    Fabric = fabric_module().Fabric

__all__ = ["Lite"]


class Lite(Fabric):
    """Runs your own training loop on any device and with any strategy: write the loop in `run`.

    The flags have the names, order and meaning of LightningLite's; ``docs/lite.md`` lists all of them.

    Args:
        accelerator: ``"cpu"`` (the default), ``"gpu"``, ``"tpu"``, ``"auto"``, or another value for Fabric.
        strategy: A name that ``nnx list`` or Lightning knows, or a strategy object of Trainer or Fabric.
        devices: The number of devices, or their indices (``[1, 4]``, ``"1, 4"``). -1 and ``"auto"`` mean all,
            0 and None the CPU.
        num_nodes: The number of machines.
        precision: 16, 32, 64, ``"bf16"``, or one of Lightning's present strings.
        plugins: A cluster environment, precision plugin or checkpoint IO, or a list of these.
        gpus: Short for `devices` with ``accelerator="gpu"``.
        tpu_cores: Short for `devices` with ``accelerator="tpu"``.
        callbacks: Callbacks for Fabric.
        loggers: Loggers for Fabric.

    Raises:
        OptionError: A flag's value is unknown, or flags contradict each other.
        UnsupportedError: This machine lacks the accelerator.

    Example:
        >>> class Train(Lite):
        ...     def run(self, start):
        ...         return start + self.world_size
        >>> Train().run(41)
        42
    """

    def __init__(  # the original's order
        self,
        accelerator: Any = None,
        strategy: Any = None,
        devices: Any = None,
        num_nodes: int = 1,
        precision: Any = 32,
        plugins: Any = None,
        gpus: Any = None,
        tpu_cores: Any = None,
        *,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        chosen = fabric_arguments(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            gpus=gpus,
            tpu_cores=tpu_cores,
        )
        self._set_up: list[nn.Module] = []
        super().__init__(**chosen, callbacks=callbacks, loggers=loggers)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override this with your loop. A call starts the processes and returns rank zero's value.

        Raises:
            UnsupportedError: The method was not overridden.
        """
        raise UnsupportedError(
            f"{type(self).__name__}.run has no body.",
            remedy="Inherit from Lite, put the training loop in `run`, and call it; or use Fabric.",
        )

    def setup(  # type: ignore[override] # Fabric calls the model a module
        self, model: nn.Module, *optimizers: Optimizer, move_to_device: bool = True, scheduler: Any = None
    ) -> Any:
        """Set up a model, and the optimizers of its parameters. Call it once for each model.

        Args:
            model: The model. Strategies that shard it change the same object in place.
            *optimizers: None, one or several.
            move_to_device: False to leave the model on its device, for models placed by hand.
            scheduler: A scheduler for Fabric.

        Returns:
            The model; with optimizers, a list of the model, each optimizer, and then the scheduler.
        """
        made = super().setup(model, *optimizers, scheduler=scheduler, move_to_device=move_to_device)
        wrapped, *rest = made if optimizers else (made,)
        module = self._wrap_module(wrapped)
        count = len(optimizers)
        others = [*wrap_optimizers(self, model, rest[:count]), *rest[count:]]
        return [module, *others] if optimizers else module

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> Any:
        """Set up a model alone; ``setup_optimizers`` may set up its optimizers later."""
        made = super().setup_module(module, move_to_device=move_to_device, _reapply_compile=_reapply_compile)
        return self._wrap_module(made)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers of models that are already set up: one, or a list of several."""
        made = super().setup_optimizers(*optimizers)
        several = made if isinstance(made, tuple) else (made,)
        wrapped = wrap_optimizers(self, None, several)
        return wrapped if len(wrapped) > 1 else wrapped[0]

    def _wrap_module(self, wrapped: Any) -> Any:
        leave_process_group_at_exit()  # Lightning's strategies do this under NCCL only
        module = wrap_module(self, wrapped)
        self._set_up.append(module.module)
        return module

    def setup_dataloaders(  # type: ignore[override] # Fabric calls the switch differently
        self, *dataloaders: Any, replace_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Set up loaders, so that every process reads its share onto its device.

        Args:
            *dataloaders: One or several.
            replace_sampler: False to keep your own sampler.
            move_to_device: False to leave the data on the loader's device.

        Returns:
            The loader, or a list of several.
        """
        return super().setup_dataloaders(
            *dataloaders, use_distributed_sampler=replace_sampler, move_to_device=move_to_device
        )

    def reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors, numbers or collections over the processes, without changing the input.

        Args:
            data: A tensor, a number, or a collection of these.
            group: The process group; all processes by default.
            reduce_op: ``"mean"``, ``"sum"``, or an operation of torch.distributed.
        """
        copied = apply_to_collection(data, Tensor, Tensor.clone)  # Fabric's `all_reduce` changes its input
        return self.all_reduce(copied, group=group, reduce_op=reduce_op)

    def reduce_decision(self, decision: bool) -> bool:
        """Return True if all processes pass True, so that they stop early together or not at all."""
        return bool(self.reduce(float(decision), reduce_op="sum").item() == self.world_size)

    def save(self, content: Any, filepath: Any, filter: Any = None) -> None:
        """Save a dict. Call it on every process.

        Models, optimizers and an engine's ``state_dict()`` go to an nnx checkpoint: a directory that all
        processes write together, that Trainer resumes, and that every strategy reads. Other content goes to a
        file. Rank zero writes the file, and waits for no other process.

        Args:
            content: The objects to save, by your own keys.
            filepath: The path. Fabric's argument order, path first, also works.
            filter: A filter for Fabric, which then saves the content.

        Raises:
            CheckpointError: The content cannot be stored.
        """
        if isinstance(content, (str, os.PathLike)) and isinstance(filepath, Mapping):
            content, filepath = filepath, content
        target = state_of(self.strategy, self._set_up)
        if target is None or filter is not None:
            super().save(filepath, content, filter=filter)
            return
        unwrapped = unwrap(content)
        if is_plain(target, unwrapped):
            save_file(self.strategy, content, filepath)
            return
        save_content(target, unwrapped, self.strategy.broadcast(filepath))
        self.strategy.barrier()

    def load(
        self, filepath: Any, state: Any = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> Any:
        """Load a checkpoint of any format and any strategy. Collective: call it on every process.

        Args:
            filepath: A checkpoint of `save`, Fabric, Trainer or ``torch.save``.
            state: Objects to restore in place by key. By default `load` returns the content.
            strict: True to refuse keys of `state` that the checkpoint lacks.
            weights_only: False to run code in the file; pass it only for files that you trust.

        Returns:
            The content under its keys, with state dicts still on disk; with `state`, the remaining content.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or of another model.
        """
        target = state_of(self.strategy, self._set_up)
        if target is None:
            return super().load(filepath, state, strict=strict, weights_only=weights_only)
        filepath = self.strategy.broadcast(filepath)
        if state is None:
            return load_content(target, filepath, weights_only)
        unwrapped = unwrap(state)
        rest = load_fabric_checkpoint(target, filepath, unwrapped, strict, weights_only)
        for key in state if isinstance(state, dict) else ():
            if not isinstance(state[key], (nn.Module, Optimizer)):
                state[key] = unwrapped[key]
        self.strategy.barrier()
        return rest
