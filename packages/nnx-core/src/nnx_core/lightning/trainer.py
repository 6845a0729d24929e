"""The Trainer adapter: Lightning's `Strategy` interface on top of a `Backend`.

``docs/tour.md`` lists the order in which Trainer calls these members.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx_base.clean_up import CleanUp, note
from nnx_base.ranks import all_arrive, control_group, together
from nnx_checkpoint.format.inflight import settle_quietly, take_error
from nnx_checkpoint.reading.state import OptimizerState, parameter_names, repoint_optimizer
from nnx_checkpoint.writing.background import poll
from nnx_checkpoint.writing.request import SaveRequest
from nnx_core._torch_compat import complete_optimizer
from nnx_core.agree.collective_order import CollectiveOrder, end_run, report_failure
from nnx_core.agree.direct_calls import stop_warning
from nnx_core.agree.rank_failures import LAST_BATCH
from nnx_core.backend import Backend
from nnx_core.errors import CheckpointError, NnxError, UnsupportedError, is_lost_connection
from nnx_core.lightning.averaging import Averages
from nnx_core.lightning.beginning import size_of_batch
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_core.lightning.compat import (
    attached_trainer,
    is_last_of_evaluation,
    is_wrapping_checkpoint_io,
    make_optimizers,
)
from nnx_core.lightning.memory import attach, request_of
from nnx_core.lightning.prediction import EvenPrediction, _renamed
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.resume.resume import ExactResume
from nnx_core.lightning.routing import (
    publishes_gradients,
    refuse_plain_backward,
    route_clipping,
    route_optimizer_steps,
    route_precision,
    unroute_precision,
    unwrap_optimizer,
)
from nnx_core.lightning.sample import TrainerSample
from nnx_core.lightning.strategy_checkpoint import (
    collect_shards,
    load_lightning_checkpoint,
    module_state_dict,
    restore_model,
    restore_optimizers,
    save_lightning_checkpoint,
    take_rank_entries,
)
from nnx_core.view.guard import as_stored
from nnx_core.view.modules import (
    allocate_again,
    is_left,
    leave_on_meta,
    move_states,
    move_to_host,
    refuse_exchanged,
    refuse_layers,
)

__all__ = ["TrainerAdapter"]


# An engine that keeps gradients outside of ``p.grad`` must publish them if user code may read them. Looked up
# at each backward, because callbacks can be added and removed at any time.


def looks_after_backward(root: str, module: Any) -> bool:
    """Return True if user code may read gradients after every backward, also while they accumulate.

    Args:
        root: The root of Lightning's tree, such as ``"lightning.pytorch"``.
        module: The LightningModule, attached to its Trainer.
    """
    return not module.automatic_optimization or _overrides(root, module, ("on_after_backward",))


def looks_before_step(root: str, module: Any) -> bool:
    """Return True if user code may read gradients between the last backward and ``zero_grad``.

    Args:
        root: See `looks_after_backward`.
        module: See `looks_after_backward`.
    """
    hooks = (
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
        "on_before_zero_grad",
    )
    return _overrides(root, module, hooks)


def _overrides(root: str, module: Any, hooks: tuple[str, ...]) -> bool:
    tree = importlib.import_module(root)
    if any(_is_overridden(module, hook, tree.LightningModule) for hook in hooks):
        return True
    return any(
        _is_overridden(callback, hook, tree.Callback)
        for callback in module.trainer.callbacks
        for hook in hooks
    )


def _is_overridden(instance: Any, hook: str, base: type) -> bool:
    if hook in vars(instance):  # set on the object itself
        return True
    own = getattr(type(instance), hook, None)
    return own is not None and own is not getattr(base, hook, None)


# Lightning's own undo of its layer plugins leaves layers of another class. Here the user's own layers return,
# with the trained values of their replacements.


def synchronize_layers(layer_sync: Any, module: nn.Module) -> dict[str, nn.Module]:
    """Apply one of Lightning's ``LayerSync`` plugins in place.

    Args:
        layer_sync: The plugin.
        module: The module with the layers to replace; the module itself stays.

    Returns:
        The replaced layers, by name.
    """
    before = dict(module.named_modules(remove_duplicate=False))
    layer_sync.apply(module)
    after = dict(module.named_modules(remove_duplicate=False))
    return {name: layer for name, layer in before.items() if after.get(name) is not layer}


def restore_layers(module: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Restore replaced layers, with the parameters and buffers of their replacements."""
    for name, original in originals.items():
        stand_in = module.get_submodule(name)
        original._parameters.update(stand_in._parameters)
        original._buffers.update(stand_in._buffers)
        original.train(stand_in.training)
        parent, _, child = name.rpartition(".")
        module.get_submodule(parent)._modules[child] = original


log = logging.getLogger("nnx.lightning")

_ALIKE = (
    "Use the Trainer alike on every rank: log, reduce and save on all of them, even if only rank 0 needs the "
    "result, and stop all of them, with "
    "`trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)` on every rank."
)

_TIME_TO_FAIL_TOGETHER = 5.0
"""Seconds after an error in which the other ranks must fail, too, to count as failing together."""


class _Phase(Enum):
    """The state of a strategy and its module."""

    NO_RUN = "no run is active in this process, and the module is as the user built it"
    JOINED = "the run has begun: hooks set up the module and restore a checkpoint, before it is laid out"
    LAID_OUT = "the engine has laid the module out"


class TrainerAdapter(ParallelProcesses):
    """Mixin that makes a `Backend` a strategy of Trainer; combined with the tree's ``ParallelStrategy``."""

    model: nn.Module | None
    lightning_module: Any
    optimizers: list[Optimizer]
    _lightning_optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any
    _precision_plugin: Any
    _checkpoint_io: Any
    _layer_sync: Any

    def __init__(self, backend: Backend[Any], **kwargs: Any) -> None:
        self._replaced_layers: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        self._phase = _Phase.NO_RUN
        self._weights_to_load: tuple[Mapping[str, Any], bool] | None = None
        self._has_failed = self._accumulates = self._has_logged = self._is_alone = False
        self._loops: CollectiveOrder | None = None
        self._other_ranks_error: NnxError | None = None
        self._first_error: BaseException | None = None
        self._even_prediction = EvenPrediction()
        self._optimizers_of_backend: list[Optimizer] = []
        self._final_states: dict[Optimizer, OptimizerState] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._averages = Averages(backend)
        super().__init__(backend, **kwargs)
        self._exact_resume = ExactResume(
            resume_data=self.common.resume_data, strict_rng=self.common.strict_rng
        )

    def _precision_name(self) -> str:
        return str(self.precision_plugin.precision)

    def setup_precision_plugin(self) -> None:
        """Connect the plugin, and send clipping, loss scaling and backward through the backend."""
        plugin = self.precision_plugin
        self.model, self.optimizers, self.lr_scheduler_configs = plugin.connect(
            self.model, self.optimizers, self.lr_scheduler_configs
        )
        route_clipping(plugin, self.backend)
        route_precision(plugin, self.backend, then=self._publish_gradients)
        self._precision_plugin = plugin

    def setup_environment(self) -> None:
        """Join the process group; the callbacks are set up next. Collective."""
        super().setup_environment()
        self._phase, self._first_error = _Phase.JOINED, None
        trainer = self.lightning_module.trainer
        self._averages.prepare(self.root, trainer)
        every = self.common.memory_checkpoint
        if every is not None and trainer.state.fn == "fit":
            attach(trainer, self.root, every, self.common.memory_directory, self._request_copy)

    def _request_copy(self, checkpoint: dict[str, Any], path: str) -> SaveRequest:
        """Return this rank's part of a copy in memory. Collective."""
        trainer = self.lightning_module.trainer
        saved = collect_shards(checkpoint, self._exact_resume.state(trainer))
        step, opaque = trainer.global_step, self.common.opaque_objects
        return request_of(saved, path, step=step, strategy=self.name, opaque=opaque)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context that makes new tensors on the device, or on ``meta`` with `empty_init`."""
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context of ``configure_model`` and ``configure_sharded_model``."""
        return self.backend.module_init_context()

    def setup(self, trainer: Any) -> None:
        """Lay the model out, build the optimizers and fill in the weights of a checkpoint. Collective."""
        self.accelerator.setup(trainer)
        if isinstance(self.checkpoint_io, CheckpointIO):
            self.checkpoint_io.start_run()
        module = self.precision_plugin.convert_module(self.lightning_module)
        fitting = trainer.state.fn == "fit"
        self._has_logged = self._is_alone = False
        if fitting and self._layer_sync is not None:
            self._replaced_layers = synchronize_layers(self._layer_sync, module)
        self.model = module
        if self._weights_to_load is None:
            self._refuse_untrained_weights("a run begins with the weights of the module")
        self._repoint(allocate_again(module))
        if fitting:
            refuse_layers(module, shares=self.backend.data_parallel_rank_and_size[1])
        sample = TrainerSample(trainer, module)
        if fitting and self.common.check_plan:
            from nnx_core.lightning.plan_check import attach_check

            attach_check(self, trainer, module, sample)
        replaced = self.backend.parallelize(module, sample)
        if fitting:
            self._final_states.clear()
            self.setup_optimizers(trainer)
        self._repoint(replaced)  # the module's `__init__` may have built them before the layout
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self.optimizers] if fitting else []
        for optimizer in optimizers:
            complete_optimizer(optimizer)
        self.backend.setup_optimizers(module, optimizers)
        self._phase = _Phase.LAID_OUT
        weights, self._weights_to_load = self._weights_to_load, None
        if weights is not None:
            restore_model(self.backend, module, weights[0], strict=weights[1])
        self._averages.lay_out(trainer, module)
        self._hooks = refuse_plain_backward(self.backend, module) if fitting else []
        self._optimizers_of_backend = optimizers
        self._names = parameter_names(module)
        self.setup_precision_plugin()  # it makes Lightning's wrappers of the optimizers again
        if fitting:
            route_optimizer_steps([*optimizers, *self._lightning_optimizers], self.backend, module)
        self._loops = CollectiveOrder(remedy=_ALIKE, wait=float("inf"), is_of_engine=False)
        self._loops.open()

    def _refuse_untrained_weights(self, what: str) -> None:
        """Refuse an operation on weights that were not gathered after the last run. Collective."""
        with together(control_group(), doing="looking for the weights"):
            if self.is_global_zero and is_left(self.lightning_module):
                raise UnsupportedError(
                    f"{what}, and the weights were not gathered here at the end of the last run "
                    "(gather_at_end).",
                    remedy="Pass `ckpt_path`, save during the run, or gather: gather_at_end='rank0'.",
                )

    def _repoint(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for optimizer in self.optimizers:
            repoint_optimizer(optimizer, replaced)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` on the laid-out parameters."""
        module = self.lightning_module
        with as_stored(*module.parameters()):  # some optimizers make their state in the constructor
            self.optimizers, self.lr_scheduler_configs = make_optimizers(self.root, module)

    def model_to_device(self) -> None:
        """Do nothing: `Backend.parallelize` moves the module, layer by layer if necessary."""

    def teardown(self) -> None:
        """Restore the module's plain parameters and class, on CPU. Collective.

        If one step of it fails, the others still run. An earlier error of the run is raised in preference.

        Raises:
            CheckpointError: The save in flight failed, and nothing else did.
        """
        cleaning, self._first_error = CleanUp(self._first_error), None
        save_error = self._end_saving()
        self._phase, self._weights_to_load = _Phase.NO_RUN, None
        end_run()
        if self._loops is not None:
            self._loops.close(together=not self._has_failed)
        stop_warning()
        module = self.lightning_module
        trainer = attached_trainer(module)
        if trainer is not None:  # None in a process that only launches others
            cleaning.run("closing the loaders", partial(self._exact_resume.close, trainer))
        if module is not None and self._backend_is_set_up and self._can_gather():
            cleaning.run("gathering the model", partial(self._gather_model, module))
        cleaning.run("removing averaged weights", partial(self._averages.give_back, gather=False))
        cleaning.run("closing the engine", self.backend.teardown)
        self._backend_is_set_up = False
        cleaning.run("closing the cluster environment", self.cluster_environment.teardown)
        unroute_precision(self.precision_plugin)
        for hook in self._hooks:
            hook.remove()
        for plugin in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            cleaning.run(f"closing {type(plugin).__name__}", plugin.teardown)
        if save_error is not None and cleaning.error is None:
            raise save_error
        other, self._other_ranks_error = self._other_ranks_error, None
        if other is not None:
            raise other  # it names the failed rank; the first error here is gloo's, which does not
        cleaning.finish()

    def _gather_model(self, module: Any) -> None:
        """Gather the module, and the state of its optimizers; see `teardown`. Collective."""
        self._keep_final_states(module)
        self._averages.give_back(gather=True)
        self._repoint(self.backend.unparallelize(module))
        restore_layers(module, self._replaced_layers)
        self._replaced_layers = {}
        if not self.backend.keeps_weights:
            self._repoint(leave_on_meta(module))
        move_to_host(module)
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self.optimizers]
        move_states(optimizers, self._final_states, torch.device("cpu"))

    def _keep_final_states(self, module: nn.Module) -> None:
        """Describe optimizer state before the engine drops its layout: it may be saved after the run."""
        optimizers, self._optimizers_of_backend, self._names = self._optimizers_of_backend, [], {}
        for optimizer in optimizers:
            with suppress(CheckpointError):  # raised again by a save
                self._final_states[optimizer] = self.backend.optimizer_state(module, optimizer)

    def _end_saving(self) -> BaseException | None:
        """Wait for the save in flight, also after an error in training."""
        if not self._has_failed:
            return take_error()
        settle_quietly()
        return None

    def on_exception(self, exception: BaseException) -> None:
        """Record the error for `teardown`, and log a lost rank, which gloo's error does not name."""
        self._has_failed, self._first_error = True, exception
        if self._is_between_setup_and_first_step():
            note(
                exception,
                "The engine had already laid the model out. Replace, tie or parametrize layers in `__init__` "
                "or `configure_model`.",
            )
        if self._loops is not None:
            self._other_ranks_error = self._loops.cause_of(exception)
            report_failure(exception)
        if is_lost_connection(exception):
            log.error(
                "Rank %d lost another rank in a collective: that rank's process has ended or hangs, or its "
                "machine is unreachable. Its own output has the cause. Resume from the last checkpoint.",
                self._rank,
            )

    def _is_between_setup_and_first_step(self) -> bool:
        trainer = attached_trainer(self.lightning_module)
        is_fitting = trainer is not None and trainer.state.fn == "fit" and not trainer.sanity_checking
        return is_fitting and self._phase is _Phase.LAID_OUT and not self._has_logged

    def _can_gather(self) -> bool:
        """Return False after an error if other ranks do not reach `teardown`: gathering needs all ranks."""
        if not self._has_failed:
            return True
        self._has_failed = False
        if not self._is_alone and all_arrive("teardown", timeout=_TIME_TO_FAIL_TOGETHER):
            return True
        log.warning(
            "The model of rank %d stays sharded, because the ranks did not fail together (see the error)",
            self._rank,
        )
        return False

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed a loader's workers, and resume a training loader at the position of the checkpoint."""
        seeded = super().process_dataloader(dataloader)
        return self._exact_resume.process(self.lightning_module.trainer, seeded)

    def on_train_start(self) -> None:
        """Restore the random state, after all setup code that draws from it."""
        self._exact_resume.start(self.lightning_module.trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` through the engine."""
        self._follow_optimizers()
        if not self._has_logged:
            self._has_logged, trainer = True, self.lightning_module.trainer
            self.backend.model_state(self.lightning_module)  # reshard after a forward, as of a summary
            refuse_exchanged(self.lightning_module, self._names, self._optimizers_of_backend)
            batch = next(iter([*args, *kwargs.values()]), None)
            accumulate = trainer.accumulate_grad_batches
            self._log_beginning(self.lightning_module, size_of_batch(batch), accumulate=accumulate)
            self._exact_resume.compare_batch(trainer, batch, own_batch=self.backend.own_batch)
        with self._reporting(), self.precision_plugin.train_step_context():
            if self._loops is not None:
                self._loops.begin("training_step")
                self._loops.end()
            result = self._step("training_step", args, kwargs)
            if result is None:
                self._refuse_none()
            self._log_metrics()
            return result

    def _log_metrics(self) -> None:
        """Log the engine's metrics in the second step, and in those of which loggers write values."""
        metrics, trainer = self.backend.metrics(), self.lightning_module.trainer
        every, step = trainer.log_every_n_steps, trainer.global_step
        is_due = step == 1 or bool(every and (step + 1) % every == 0)  # a call of `log` takes a millisecond
        if metrics and is_due and not trainer.barebones:
            self.lightning_module.log_dict(dict(metrics), on_step=True, on_epoch=False, batch_size=1)

    def _refuse_none(self) -> None:
        """Refuse to skip a batch on this rank: the other ranks may wait in its backward."""
        if (
            dist.is_initialized()
            and dist.get_world_size() > 1
            and self.lightning_module.automatic_optimization
        ):
            raise UnsupportedError(
                f"training_step returned None on rank {dist.get_rank()}, and its batch cannot be skipped: "
                "ranks reduce their gradients together.",
                remedy="Return a loss of zero that depends on the model, such as `0 * self(x).sum()`.",
            )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Run collectives in a context; an error caused by another rank is replaced by that rank's error."""
        if self._loops is None:
            yield
            return
        try:
            with self._loops.reporting():
                yield
        except Exception as error:
            report_failure(error)
            raise

    def _announce(self, what: str) -> None:
        """Announce a collective of a Trainer's loops, hooks and loggers, which every rank must reach."""
        super()._announce(what)
        if self._loops is not None:
            stops = getattr(attached_trainer(self.lightning_module), "should_stop", False)
            self._loops.arrive(what, cause=", as trainer.should_stop is set there" if stops else "")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` through the engine, without gradients."""
        with self._reporting(), self.precision_plugin.val_step_context(), self._evaluation_context():
            return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` through the engine, without gradients."""
        with self._reporting(), self.precision_plugin.test_step_context(), self._evaluation_context():
            return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` through the engine, without gradients, equally often on all ranks."""
        with self._reporting(), self.precision_plugin.predict_step_context(), self._evaluation_context():
            predicted = self._step("predict_step", args, kwargs)
            self._even_prediction.after_step(lambda: self._step("predict_step", args, kwargs), *args)
            return predicted

    def _follow_optimizers(self) -> None:
        """Pass optimizers to the backend that user code has replaced during training."""
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self.optimizers]
        if optimizers == self._optimizers_of_backend:
            return
        self.backend.exchange_optimizers(self.lightning_module, optimizers)
        wrapped = self._lightning_optimizers
        route_optimizer_steps([*optimizers, *wrapped], self.backend, self.lightning_module)
        self._optimizers_of_backend = optimizers

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, raise errors of a finished background save, and compare the ranks if due."""
        poll()
        self._follow_optimizers()
        with self._reporting():
            result = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc] # of the tree's
        self.divergence_check.after_step(self.lightning_module, lambda: self._optimizers_of_backend)
        return result

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = getattr(self.lightning_module, name)
        first, index, *loader = [*args, *kwargs.values(), None, None][:3]
        where = name if not loader or loader[0] is None else f"{name} of loader {loader[0]}"
        training = name == "training_step"
        self._batches.compare(first, where=where, begins=index == 0, in_step=training)
        if not training and self._ends_evaluation(name):
            step = _renamed(step, f"{name}{LAST_BATCH}")
        self._in_step = True
        try:
            return self.backend.run_step(self.lightning_module, step, *args, **kwargs)
        finally:
            self._in_step = False

    def _publish_gradients(self) -> None:
        """Publish the gradients of a backward, if user code may read them."""
        if not self._accumulates and self._shows_gradients():
            self.backend.publish_gradients(self.lightning_module)

    def _ends_evaluation(self, name: str) -> bool:
        """Return True for the last batch of this rank's evaluation; see `LAST_BATCH`."""
        if name == "predict_step" and self._even_prediction.is_known:
            return False
        return is_last_of_evaluation(self.lightning_module.trainer, name)

    def _shows_gradients(self) -> bool:
        if not publishes_gradients(self.backend):
            return False
        module = self.lightning_module
        return looks_after_backward(self.root, module) or looks_before_step(self.root, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward only accumulates: all micro batches but the last."""
        module = self.lightning_module
        if publishes_gradients(self.backend) and looks_after_backward(self.root, module):
            yield  # published gradients must be reduced after each backward
            return
        self._accumulates = True
        try:
            with self.backend.no_sync(module):
                yield
        finally:
            self._accumulates = False

    def on_validation_start(self) -> None:
        """Evaluate with rank 0's buffers on every rank."""
        self._announce("the beginning of an evaluation")
        self.backend.sync_buffers(self.lightning_module)

    on_test_start = on_validation_start

    def on_predict_start(self) -> None:
        """Do as `on_validation_start`, and agree on the number of steps over the ranks."""
        self.on_validation_start()
        batches = self.lightning_module.trainer.num_predict_batches
        self._even_prediction.start(batches, most=self._most)

    def on_validation_end(self) -> None:
        """Compare the ranks at the end of an evaluation."""
        self._announce("the end of an evaluation")

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self) -> None:
        """Compare the ranks at the end of training."""
        self._announce("the end of training")

    def _most(self, own: int) -> int:
        return int(self._reduce(torch.tensor(own), None, "max"))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the result reaches every rank."""
        if group in (None, dist.group.WORLD):
            self._announce("a reduction over the ranks, as of self.log(..., sync_dist=True)")
        with self._reporting():
            return self._reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks, or any of them, decide so."""
        self._announce("a decision over the ranks")
        with self._reporting():
            return super().reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stack the tensors of all ranks; ranks that read the same share of the data contribute once."""
        with self._reporting():
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes (unless this one has failed alone)."""
        if not self._is_alone:
            super().barrier(name)

    def _fails_alone(self) -> bool:
        """Return True after an error if other ranks do not reach the save, and would never answer."""
        trainer = attached_trainer(self.lightning_module)
        if self._phase is _Phase.NO_RUN or trainer is None or not trainer.interrupted or self._is_alone:
            return self._is_alone
        self._is_alone = not all_arrive("saving after an error", timeout=_TIME_TO_FAIL_TOGETHER)
        if self._is_alone:
            log.error(
                "Saved nothing after the error: the other ranks did not reach the save with rank %d",
                self._rank,
            )
        return self._is_alone

    @property
    def checkpoint_io(self) -> Any:
        """The user's checkpoint IO, or `nnx.CheckpointIO`, which wrappers get as their base."""
        io = self._checkpoint_io
        if io is None:
            self._checkpoint_io = self._own_checkpoint_io()
        while is_wrapping_checkpoint_io(self.root, io):
            if io.checkpoint_io is None:
                io.checkpoint_io = self._own_checkpoint_io()
            io = io.checkpoint_io
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return handles on this rank's shards by parameter name; empty if it has failed alone."""
        if self._fails_alone():
            return {}
        self._announce("the saving of a checkpoint")  # some engines compare the ranks to describe their state
        return module_state_dict(self.backend, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Return handles on this rank's optimizer state by parameter name; empty if it has failed alone."""
        if self._fails_alone():
            return {}
        optimizer = unwrap_optimizer(optimizer)
        if optimizer in self._final_states:
            return self._final_states[optimizer]
        return self.backend.optimizer_state(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint (unless this rank has failed alone). Collective."""
        if self._fails_alone():
            return
        self._announce("the saving of a checkpoint")
        if self._phase is _Phase.NO_RUN:
            self._refuse_untrained_weights("a checkpoint needs weights")
        trainer = attached_trainer(self.lightning_module)  # None if other processes ran it
        resumable = "optimizer_states" in checkpoint  # a weights-only checkpoint has none
        own = self._exact_resume.state(trainer) if resumable and trainer is not None else None
        save_lightning_checkpoint(self, checkpoint, self.broadcast(filepath), storage_options, own=own)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint; its tensors are read once the module is laid out."""
        checkpoint = load_lightning_checkpoint(self, self.broadcast(checkpoint_path), weights_only)
        take_rank_entries(checkpoint, self.global_rank, self.world_size)
        trainer = attached_trainer(self.lightning_module)
        if trainer is not None:
            self._exact_resume.load(trainer, checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this rank's shards of the weights in place; before the layout, postpone it to `setup`.

        Trainer calls it before `setup`, as under ``ddp``, so that callbacks and hooks have the state of the
        checkpoint when they get the optimizers.
        """
        weights = checkpoint["state_dict"]
        if self._phase is _Phase.JOINED:
            self._weights_to_load = copy(weights), strict  # callbacks may remove entries from theirs
            return
        restore_model(self.backend, self.lightning_module, weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this rank's shards of every optimizer's state in place, and resume the data."""
        self._exact_resume.activate()
        restore_optimizers(
            self.backend, self.lightning_module, self.optimizers, checkpoint["optimizer_states"]
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint on rank zero."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)
