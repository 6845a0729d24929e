"""Hand the state of a running Trainer to another process, which continues at the same batch.

The state is that of a checkpoint: model, optimizers, schedulers, precision, loops, callbacks, random state
and the position in the data. It is read between two batches, and taken over right before the first batch of
a run (in the strategy's `on_train_start`), through the same code that resumes from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnx_base.shard import Shard
from nnx_checkpoint.reading.naming import RANKS
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.compat import dump_checkpoint
from nnx_core.lightning.strategy_checkpoint import restore_model

__all__ = ["give_state", "prepare_batch", "progress_of", "take_state", "training_loaders"]


def progress_of(strategy: Any, trainer: Any) -> dict[str, Any]:
    """Return loops, random state and data position at the beginning of a step, for `give_state` inside it."""
    loops = trainer._checkpoint_connector._get_loops_state_dict()
    return {"loops": loops, RANKS: [strategy._exact_resume.state(trainer)]}


def give_state(strategy: Any, trainer: Any, progress: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a run in CPU memory.

    Args:
        strategy: The strategy, of one process, which holds unsharded tensors.
        trainer: Its Trainer, in a step of `fit` before the optimizer's.
        progress: The result of `progress_of` at the beginning of the step.
    """
    with torch.no_grad():
        state: dict[str, Any] = _copied(dump_checkpoint(trainer))
    return {**state, **_copied(progress)}


def take_state(strategy: Any, trainer: Any, state: dict[str, Any], *, loaders: Sequence[Any]) -> None:
    """Resume from another process's state (right before the first batch of a run).

    Args:
        strategy: The strategy.
        trainer: Its Trainer, whose loops are reset, and have not begun.
        state: The result of `give_state`.
        loaders: The training loaders whose position is that of the state.
    """
    connector, loop, resume = trainer._checkpoint_connector, trainer.fit_loop, strategy._exact_resume
    resume.load(trainer, state)
    connector._loaded_checkpoint = state
    module = strategy.lightning_module
    restore_model(strategy.backend, module, state["state_dict"], strict=module.strict_loading)
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    for loader in loaders:  # they were made before the position was known
        resume.process(trainer, loader)
    iter(loop._data_fetcher)
    loop.reset()
    resume.start(trainer)
    _do_not_validate_again(loop)


def training_loaders(trainer: Any) -> list[Any]:
    """Return the training loaders of a run, which has begun."""
    return list(trainer.fit_loop._combined_loader.flattened)


def prepare_batch(strategy: Any, batch: Any) -> Any:
    """Do to a batch from a training loader what Lightning does before a step, up to the device."""
    batch = strategy.precision_plugin.convert_input(batch)
    batch = strategy.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return strategy.batch_to_device(batch, dataloader_idx=0)


def _do_not_validate_again(loop: Any) -> None:
    """Begin with the next batch: Lightning would otherwise end the batch before it once more."""
    epoch = loop.epoch_loop
    if epoch.batch_progress.current.ready == 0:
        epoch.restarting = False  # this epoch has no batch to resume after
    elif epoch._should_check_val_fx(loop._data_fetcher):
        epoch._batches_that_stepped -= 1  # it counts the batch before once more


def _copied(value: Any) -> Any:
    """Return a tree with its tensors copied to CPU memory."""
    if isinstance(value, Shard):
        if not value.is_whole:
            raise UnsupportedError(
                "a sharded tensor cannot be handed to another process whole.",
                remedy="Use a strategy whose processes hold unsharded tensors.",
            )
        return value.data[0].to("cpu", copy=True)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
