"""Callbacks that add features of nnx's strategies to Lightning's own strategies.

Two of them, for exact resume and for names of parameters, belong to `nnx.CheckpointIO`. Lightning's public
``callbacks_factory`` entry point adds them to a Trainer if a CheckpointIO exists in the process. The user
passes the third one, `nnx.compare_ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nnx_base.ranks import control_group, gather_object
from nnx_checkpoint.format.inflight import current, settle_quietly
from nnx_checkpoint.reading.naming import RANKS, Saved
from nnx_checkpoint.writing.background import poll
from nnx_checkpoint.writing.request import SaveRequest
from nnx_core.agree.divergence import DivergenceCheck
from nnx_core.backend import Backend, NoOptions, Sample
from nnx_core.errors import OptionError
from nnx_core.lightning.checkpoint import (
    CheckpointIO,
    collect_unsharded,
    exists,
    innermost_checkpoint_io,
)
from nnx_core.lightning.compat import make_callback
from nnx_core.lightning.memory import attach, request_of
from nnx_core.lightning.namespaces import trainer_tree
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.resume.resume import ExactResume
from nnx_core.optimizers.gradients import Gradient, gradients_of

__all__ = ["callbacks", "compare_ranks"]


# nnx's strategies call `ExactResume` in two hooks, which do nothing in Lightning's strategies. The callback
# sets them on the strategy object during a ``fit``.


_HOOKS = ("process_dataloader", "on_train_start")


class ResumeCallback:
    """Mixin of a callback that saves and restores random state and data position.

    Attributes:
        root: The tree of Lightning whose callback this is.
    """

    root: str
    _resume: ExactResume | None = None
    _has_compared = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of `make_callback`, because the class is made at run time."""
        return (make_callback, (ResumeCallback, self.root))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the hooks for a fit with an `nnx.CheckpointIO` and a strategy of Lightning."""
        strategy = trainer.strategy
        io = innermost_checkpoint_io(strategy.checkpoint_io)
        self._resume, self._has_compared = None, False
        if stage != "fit" or io is None:
            return
        every, ours = io.memory_checkpoint, isinstance(strategy, ParallelProcesses)
        if ours and every is not None:
            raise OptionError(
                f"memory_checkpoint={every} is an option of {type(strategy).__name__} itself.",
                remedy=f"Pass it there: nnx.strategy({strategy.name!r}, memory_checkpoint={every}).",
            )
        if ours:
            return
        if every is not None:
            request = partial(_request_copy, trainer, io)
            attach(trainer, self.root, every, io.memory_directory, request)
        self._resume = ExactResume(resume_data=io.resume_data, strict_rng=io.strict_rng)
        strategy.process_dataloader = partial(_process, self._resume, trainer, strategy.process_dataloader)
        strategy.on_train_start = partial(self._resume.start, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compare the global batch size with that of the checkpoint."""
        if self._resume is not None and not self._has_compared:
            self._has_compared = True
            self._resume.compare_batch(trainer, batch, own_batch="")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Send this rank's state to rank zero, which writes the checkpoint."""
        if self._resume is None:
            return
        ranks = gather_object(self._resume.state(trainer), control_group())
        if ranks is not None:
            checkpoint[RANKS] = ranks

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the state to resume from the checkpoint."""
        if self._resume is not None:
            self._resume.load(trainer, checkpoint)
            self._resume.activate()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore strategy and loaders."""
        if self._resume is not None:
            self._resume.close(trainer)
        for hook in _HOOKS:
            vars(trainer.strategy).pop(hook, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tear down after an error, because Lightning does not call `teardown`."""
        if self._resume is not None:
            self.teardown(trainer, pl_module, "fit")


def _request_copy(trainer: Any, io: CheckpointIO, checkpoint: dict[str, Any], path: str) -> SaveRequest:
    """Return this rank's part of a copy in memory: rank zero has all of it, as on disk."""
    saved = collect_unsharded(checkpoint) if trainer.is_global_zero else Saved()
    step, strategy = trainer.global_step, type(trainer.strategy).__name__
    return request_of(saved, path, step=step, strategy=strategy, opaque=io.opaque_objects)


def _process(resume: ExactResume, trainer: Any, process: Any, loader: Any) -> Any:
    return resume.process(trainer, process(loader))


# ``ddp`` passes a CheckpointIO optimizer states with numbered parameters and without their names: this
# callback adds the names. It also raises errors of finished background saves.


class ParameterNames:
    """Mixin of a callback that writes ``param_names`` into each saved param group.

    nnx's strategies save by name, and raise errors of background saves themselves.

    Attributes:
        root: The tree of Lightning whose callback this is.
    """

    root: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of `make_callback`, because the class is made at run time."""
        return (make_callback, (ParameterNames, self.root))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add parameter names to every optimizer state with numbers."""
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        for optimizer, state in zip(trainer.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            groups = state.get("param_groups", ())
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                if all(isinstance(number, int) for number in saved["params"]):
                    saved["param_names"] = [names[id(parameter)] for parameter in group["params"]]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Allow background saves again after an earlier run has ended."""
        if isinstance(trainer.strategy.checkpoint_io, CheckpointIO):
            trainer.strategy.checkpoint_io.start_run()

    def on_train_batch_end(self, *args: Any) -> None:
        """Raise the error of a finished background save of this rank."""
        poll(collective=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for a background save of this rank; its error must not hide this one."""
        save = current()
        if save is not None and not save.collective:
            settle_quietly()


def callbacks() -> list[Any]:
    """Entry point for ``lightning.pytorch``."""
    return _callbacks("lightning.pytorch")


def mirror_callbacks() -> list[Any]:
    """Entry point for ``pytorch_lightning``."""
    return _callbacks("pytorch_lightning")


def _callbacks(root: str) -> list[Any]:
    return [make_callback(ParameterNames, root), make_callback(ResumeCallback, root)] if exists() else []


class _AsItIs(Backend[NoOptions]):
    """Describes a module that Lightning's strategy has laid out."""

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        return gradients_of(optimizer, world_size=dist.get_world_size())


class RankComparison:
    """Mixin of a callback that compares the ranks during training.

    Strategies of nnx compare by themselves, so the callback only sets their interval. Under a strategy of
    Lightning, whose modules hold plain tensors or DTensors, the callback compares.

    Args:
        every: The interval in steps.

    Attributes:
        root: The tree of Lightning whose callback this is.
    """

    root: str

    def __init__(self, every: int) -> None:
        self.every = every
        self._check: DivergenceCheck | None = None
        self._steps = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of `make_callback`, because the class is made at run time."""
        return (make_callback, (RankComparison, self.root, self.every))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start counting steps."""
        self._check, self._steps = None, trainer.global_step
        if isinstance(trainer.strategy, ParallelProcesses):
            trainer.strategy.divergence_check = DivergenceCheck(trainer.strategy.backend, every=self.every)
        elif stage == "fit":
            self._check = DivergenceCheck(_AsItIs(NoOptions()), every=self.every)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Compare the ranks if the batch ended a step and they are due. Collective."""
        if self._check is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._check.after_step(pl_module, lambda: trainer.optimizers)


def compare_ranks(*, every: int = 100) -> Any:
    """Return a callback that compares replicated values over the ranks, and names the first difference.

    Args:
        every: The interval in steps; the first two steps are compared, too.

    Raises:
        OptionError: `every` is not a positive number.

    Example:
        ``Trainer(strategy="ddp", callbacks=[nnx.compare_ranks(every=100)])``
    """
    if every < 1:
        raise OptionError(f"every={every!r} is not a number of steps.", remedy="Pass, say, 100.")
    return make_callback(RankComparison, trainer_tree(), every)
