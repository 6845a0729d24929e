"""Exact resume under Lightning's own strategies, where `nnx.CheckpointIO` reads and writes.

nnx's strategies call `ExactResume` themselves. Lightning's have the same two hooks, which do nothing: this
callback puts calls into them on the strategy object, for the time of a ``fit``. It reaches Trainer as
`nnx_core.lightning.parameter_names` does.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from nnx_checkpoint.collective import control_group, gather_object
from nnx_checkpoint.naming import RANKS
from nnx_core.lightning.checkpoint_io import innermost_checkpoint_io
from nnx_core.lightning.exact_resume import ExactResume
from nnx_core.lightning.processes import ParallelProcesses

__all__ = ["ResumeCallback", "make_resume_callback"]

_HOOKS = ("process_dataloader", "on_train_start")


class ResumeCallback:
    """Mixin of a callback that saves and restores random state and data position.

    Attributes:
        root: The tree of Lightning whose callback this is.
    """

    root: str
    _resume: ExactResume | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made for one tree, so a spawned process makes it again."""
        return (make_resume_callback, (self.root,))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take part in a fit whose checkpoints are ours while its strategy is not."""
        strategy = trainer.strategy
        io = innermost_checkpoint_io(strategy.checkpoint_io)
        self._resume = None
        if stage != "fit" or io is None or isinstance(strategy, ParallelProcesses):
            return
        self._resume = ExactResume(resume_data=io.resume_data, strict_rng=io.strict_rng)
        strategy.process_dataloader = partial(_process, self._resume, trainer, strategy.process_dataloader)
        strategy.on_train_start = partial(self._resume.start, trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Send what this rank has to save to rank 0, which writes alone."""
        if self._resume is None:
            return
        ranks = gather_object(self._resume.state(trainer), control_group())
        if ranks is not None:
            checkpoint[RANKS] = ranks

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take what concerns resuming out of the checkpoint."""
        if self._resume is not None:
            self._resume.load(trainer, checkpoint)
            self._resume.activate()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave strategy and loaders as they were."""
        if self._resume is not None:
            self._resume.close(trainer)
        for hook in _HOOKS:
            vars(trainer.strategy).pop(hook, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning does not call `teardown` after an error."""
        if self._resume is not None:
            self.teardown(trainer, pl_module, "fit")


def _process(resume: ExactResume, trainer: Any, process: Any, loader: Any) -> Any:
    return resume.process(trainer, process(loader))


def make_resume_callback(root: str) -> Any:
    """A callback of the class for one tree of Lightning."""
    base = importlib.import_module(f"{root}.callbacks").Callback
    return type("NnxExactResume", (ResumeCallback, base), {"root": root})()
