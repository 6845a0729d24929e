"""Hand the state of a running Trainer to another process, which continues at the same batch.

The state is that of a checkpoint: model, optimizers, schedulers, precision, loops, callbacks, random state
and the position in the data. It is read between two batches, and taken over right before the first batch of
a run (in the strategy's `on_train_start`), through the same code that resumes from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nnx_base.shard import Shard
from nnx_checkpoint.reading.naming import RANKS
from nnx_core.lightning.compat import (
    begin_with_next_batch,
    call_before_transfer,
    dump_checkpoint,
    restore_from,
)
from nnx_core.lightning.strategy_checkpoint import restore_model

__all__ = ["give_state", "prepare_batch", "progress_of", "take_state"]


def progress_of(strategy: Any, trainer: Any) -> dict[str, Any]:
    """Return what changes within a step, at its beginning, for `give_state` inside it.

    These are the counters of the training loop, the random state and the position in the data.
    """
    ranks = [strategy._exact_resume.state(trainer)] * strategy.world_size
    return {"fit_loop": trainer.fit_loop.state_dict(), RANKS: ranks}


def give_state(strategy: Any, trainer: Any, progress: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of this rank in CPU memory.

    Args:
        strategy: The strategy.
        trainer: Its Trainer, in a step of `fit` before the optimizer's.
        progress: The result of `progress_of` at the beginning of the step.
    """
    with torch.no_grad():
        state: dict[str, Any] = _copied(dump_checkpoint(trainer))
    state["loops"]["fit_loop"] = _copied(progress["fit_loop"])
    return {**state, RANKS: _copied(progress[RANKS])}


def take_state(strategy: Any, trainer: Any, state: dict[str, Any], *, loaders: Sequence[Any]) -> None:
    """Resume from another process's state (right before the first batch of a run). Collective.

    Args:
        strategy: The strategy.
        trainer: Its Trainer, whose loops are reset, and have not begun.
        state: The result of `give_state`, on a rank of the same place.
        loaders: The training loaders whose position is that of the state.
    """
    module, resume = strategy.lightning_module, strategy._exact_resume
    resume.load(trainer, state)
    with restore_from(trainer, state):
        restore_model(strategy.backend, module, state["state_dict"], strict=module.strict_loading)
    for loader in loaders:  # they were made before the position was known
        resume.process(trainer, loader)
    begin_with_next_batch(trainer, lambda: resume.start(trainer))


def prepare_batch(strategy: Any, batch: Any) -> Any:
    """Do to a batch from a training loader what Lightning does before a step, up to the device."""
    batch = strategy.precision_plugin.convert_input(batch)
    batch = call_before_transfer(strategy.lightning_module, batch)
    return strategy.batch_to_device(batch, dataloader_idx=0)


def _copied(value: Any) -> Any:
    """Return a tree with its tensors copied to CPU memory; a shard of a whole tensor becomes the tensor."""
    if isinstance(value, Shard):
        data = tuple(view.detach().to("cpu", copy=True) for view in value.data)
        return data[0] if value.is_whole else replace(value, data=data)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
