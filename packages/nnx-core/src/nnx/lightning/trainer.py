"""Trainer's side: Lightning's `Strategy` interface on top of a `Backend`.

The order in which Trainer calls these members is in ``docs/tour.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nnx.backend import Backend
from nnx.checkpoint.background import poll
from nnx.checkpoint.pending import settle_quietly, take_error
from nnx.collective import all_arrive
from nnx.errors import CheckpointError
from nnx.lightning.averaging import Averages
from nnx.lightning.checkpoint import (
    load_lightning_checkpoint,
    module_state_dict,
    restore_model,
    restore_optimizers,
    save_lightning_checkpoint,
)
from nnx.lightning.checkpoint_io import CheckpointIO
from nnx.lightning.compat import is_wrapping_checkpoint_io, make_optimizers
from nnx.lightning.even_prediction import EvenPrediction
from nnx.lightning.exact_resume import ExactResume
from nnx.lightning.layer_sync import put_back, synchronize_layers
from nnx.lightning.processes import ParallelProcesses
from nnx.lightning.routing import (
    route_clipping,
    route_optimizer_steps,
    route_precision,
    unwrap_optimizer,
)
from nnx.lightning.sample import TrainerSample
from nnx.state import OptimizerState, repoint_optimizer

__all__ = ["TrainerAdapter"]

log = logging.getLogger("nnx.lightning")

_TIME_TO_FAIL_TOGETHER = 5.0
"""Seconds after an error in which the other ranks must have failed as well to count as failing together."""


class TrainerAdapter(ParallelProcesses):
    """Mixin that makes a `Backend` a strategy of Trainer; combined with the tree's ``ParallelStrategy``."""

    model: nn.Module | None
    lightning_module: Any
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any
    _precision_plugin: Any
    _checkpoint_io: Any
    _layer_sync: Any

    def __init__(self, backend: Backend[Any], **kwargs: Any) -> None:
        self._replaced_layers: dict[str, nn.Module] = {}
        self._has_failed = False
        self._even_prediction = EvenPrediction()
        self._optimizers_of_backend: list[Optimizer] = []
        self._final_states: dict[Optimizer, OptimizerState] = {}
        self._averages = Averages(backend)
        super().__init__(backend, **kwargs)
        self._exact_resume = ExactResume(
            resume_data=self.common.resume_data, strict_rng=self.common.strict_rng
        )

    # --- precision ----------------------------------------------------------------------------

    def _precision_name(self) -> str:
        return str(self.precision_plugin.precision)

    def setup_precision_plugin(self) -> None:
        """Connect the plugin, and send clipping, loss scaling and backward through the backend."""
        plugin = self.precision_plugin
        self.model, self.optimizers, self.lr_scheduler_configs = plugin.connect(
            self.model, self.optimizers, self.lr_scheduler_configs
        )
        route_clipping(plugin, self.backend)
        route_precision(plugin, self.backend)
        self._precision_plugin = plugin

    # --- set up -------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the process group; the callbacks are set up next. Collective."""
        super().setup_environment()
        self._averages.prepare(self.root, self.lightning_module.trainer)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where new tensors are made: on the device, or on ``meta`` when `empty_init` is asked for."""
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Active inside ``configure_model`` and ``configure_sharded_model``."""
        return self.backend.module_init_context()

    def setup(self, trainer: Any) -> None:
        """Lay the model out and build the optimizers. Collective."""
        self.accelerator.setup(trainer)
        if isinstance(self.checkpoint_io, CheckpointIO):
            self.checkpoint_io.start_run()
        module = self.precision_plugin.convert_module(self.lightning_module)
        fitting = trainer.state.fn == "fit"
        if fitting and self._layer_sync is not None:
            self._replaced_layers = synchronize_layers(self._layer_sync, module)
        self.model = module
        replaced = self.backend.parallelize(module, TrainerSample(trainer, module))
        if fitting:
            self._final_states.clear()
            self.setup_optimizers(trainer)
        for optimizer in self.optimizers:  # they may have been built before, in the module's `__init__`
            repoint_optimizer(optimizer, replaced)
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self.optimizers] if fitting else []
        self.backend.setup_optimizers(module, optimizers)
        self._averages.lay_out(trainer, module)
        route_optimizer_steps(optimizers, self.backend)
        self._optimizers_of_backend = optimizers
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` now that the parameters have their final objects."""
        self.optimizers, self.lr_scheduler_configs = make_optimizers(self.root, self.lightning_module)

    def model_to_device(self) -> None:
        """Nothing: `Backend.parallelize` moves the module, part by part if it must."""

    def teardown(self) -> None:
        """Give the module its plain parameters and class back, on the host. Collective.

        Raises:
            CheckpointError: The save in flight failed, and nothing else did.
        """
        save_error = self._end_saving()
        module = self.lightning_module
        if module is not None:
            self._exact_resume.close(module.trainer)
        if module is not None and self._backend_is_set_up and self._can_gather():
            self._keep_final_states(module)
            self._averages.give_back(gather=True)
            replaced = self.backend.unparallelize(module)
            for optimizer in self.optimizers:
                repoint_optimizer(optimizer, replaced)
            put_back(module, self._replaced_layers)
            self._replaced_layers = {}
            _move_to_host(module)
        self._averages.give_back(gather=False)
        self.backend.teardown()
        self._backend_is_set_up = False
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if save_error is not None:
            raise save_error

    def _keep_final_states(self, module: nn.Module) -> None:
        """Describe optimizer state while the engine knows where it lies: it may be saved after the run."""
        optimizers, self._optimizers_of_backend = self._optimizers_of_backend, []
        for optimizer in optimizers:
            with suppress(CheckpointError):  # whoever saves it will be told
                self._final_states[optimizer] = self.backend.optimizer_state(module, optimizer)

    def _end_saving(self) -> BaseException | None:
        """Let the save in flight get onto the disk, also when training failed."""
        if not self._has_failed:
            return take_error()
        settle_quietly()
        return None

    def on_exception(self, exception: BaseException) -> None:
        """Remember for `teardown` that this rank may be alone."""
        self._has_failed = True

    def _can_gather(self) -> bool:
        """After an error, whether the other ranks have come to `teardown` too: gathering needs them."""
        if not self._has_failed:
            return True
        self._has_failed = False
        if all_arrive("teardown", timeout=_TIME_TO_FAIL_TOGETHER):
            return True
        log.warning(
            "The ranks did not fail together, so the model of rank %d stays sharded. The error that "
            "follows, or another rank's, is the cause.",
            self.global_rank,
        )
        return False

    # --- data ---------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make a training loader go on where the run being resumed was interrupted."""
        seeded = super().process_dataloader(dataloader)
        return self._exact_resume.process(self.lightning_module.trainer, seeded)

    def on_train_start(self) -> None:
        """Restore the random state, after everything that draws from it while setting up."""
        self._exact_resume.start(self.lightning_module.trainer)

    # --- steps --------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` through the engine."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` through the engine, without gradients."""
        with self.precision_plugin.val_step_context(), self._evaluation_context():
            return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` through the engine, without gradients."""
        with self.precision_plugin.test_step_context(), self._evaluation_context():
            return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` through the engine, without gradients, as often as the other ranks do."""
        with self.precision_plugin.predict_step_context(), self._evaluation_context():
            predicted = self._step("predict_step", args, kwargs)
            self._even_prediction.after_step(lambda: self._step("predict_step", args, kwargs), *args)
            return predicted

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, after taking notice of a background save that has ended meanwhile."""
        poll()
        return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc] # of the tree's

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = getattr(self.lightning_module, name)
        return self.backend.run_step(self.lightning_module, step, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; Trainer enters it on all but the last micro batch."""
        with self.backend.no_sync(self.lightning_module):
            yield

    def on_validation_start(self) -> None:
        """Evaluate with rank 0's buffers on every rank."""
        self.backend.sync_buffers(self.lightning_module)

    on_test_start = on_validation_start

    def on_predict_start(self) -> None:
        """As `on_validation_start`; also agree with the other ranks on the number of steps."""
        self.on_validation_start()
        batches = self.lightning_module.trainer.num_predict_batches
        self._even_prediction.start(batches, most=self._most)

    def _most(self, own: int) -> int:
        return int(self._reduce(torch.tensor(own), None, "max"))

    # --- collectives --------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the result reaches every rank."""
        return self._reduce(tensor, group, reduce_op)

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> Any:
        """`nnx.CheckpointIO` unless the user brought another; wrappers get it as their base."""
        io = self._checkpoint_io
        if io is None:
            self._checkpoint_io = self._own_checkpoint_io()
        elif is_wrapping_checkpoint_io(self.root, io) and io.checkpoint_io is None:
            io.checkpoint_io = self._own_checkpoint_io()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into the laid-out parameters."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards by parameter name; handles, not copies."""
        return module_state_dict(self.backend, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """This rank's optimizer state by parameter name; handles, not copies."""
        optimizer = unwrap_optimizer(optimizer)
        if optimizer in self._final_states:
            return self._final_states[optimizer]
        return self.backend.optimizer_state(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, all ranks together."""
        resumable = "optimizer_states" in checkpoint  # which one of weights only is not
        own = self._exact_resume.state(self.lightning_module.trainer) if resumable else None
        save_lightning_checkpoint(self, checkpoint, self.broadcast(filepath), storage_options, own=own)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint; its tensors are read later, in `load_model_state_dict`."""
        checkpoint = load_lightning_checkpoint(self, self.broadcast(checkpoint_path), weights_only)
        self._exact_resume.load(self.lightning_module.trainer, checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this rank's part of the weights in place."""
        restore_model(self.backend, self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this rank's part of every optimizer's state in place."""
        restore_optimizers(
            self.backend, self.lightning_module, self.optimizers, checkpoint["optimizer_states"]
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, from rank 0."""
        if self.global_rank == 0:
            self.checkpoint_io.remove_checkpoint(filepath)


def _move_to_host(module: nn.Module) -> None:
    """As after every run; what an error has left on the meta device must not raise another one."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.cpu()
