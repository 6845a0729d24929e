"""The callbacks for Lightning's own strategies: the runs that get them, and spawned processes."""

from __future__ import annotations

import pickle

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

import nnx
from nnx_core.lightning.callbacks import ParameterNames, callbacks


def _quiet_trainer(**options: object) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options
    )


def test_the_one_that_names_parameters_joins_only_trainers_of_processes_that_use_our_checkpoint_io() -> None:
    io = nnx.CheckpointIO()
    found = [cb for cb in _quiet_trainer(plugins=[io]).callbacks if isinstance(cb, ParameterNames)]
    assert len(found) == 1


def test_each_can_be_sent_to_a_spawned_process() -> None:
    io = nnx.CheckpointIO()  # kept alive: without one there are no callbacks
    for callback in (*callbacks(), nnx.compare_ranks(every=7)):
        copy = pickle.loads(pickle.dumps(callback))
        assert isinstance(copy, Callback) and type(copy).__mro__[1:] == type(callback).__mro__[1:]
        assert copy.root == "lightning.pytorch"
        assert vars(copy) == vars(callback)
    assert io is not None
