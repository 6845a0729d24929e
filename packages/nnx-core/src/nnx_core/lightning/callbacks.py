"""The callbacks that a Trainer gets with `nnx.CheckpointIO` under one of Lightning's own strategies.

They reach Trainer through Lightning's public ``callbacks_factory`` entry point, and only when an
`nnx.CheckpointIO` exists in the process. nnx's own strategies need neither: they call the same things
themselves.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from nnx_checkpoint.collective import control_group, gather_object
from nnx_checkpoint.inflight import current, settle_quietly
from nnx_checkpoint.naming import RANKS
from nnx_checkpoint.writer import poll
from nnx_core.lightning.checkpoint_io import CheckpointIO, exists, innermost_checkpoint_io
from nnx_core.lightning.exact_resume import ExactResume
from nnx_core.lightning.processes import ParallelProcesses

__all__ = [
    "ParameterNames",
    "callbacks",
]


# --- exact resume ---------------------------------------------------------------------------------
# Lightning's strategies have the two hooks in which ours call `ExactResume`, and these do nothing there:
# the callback puts calls into them on the strategy object, for the time of a ``fit``.


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


# --- names of parameters --------------------------------------------------------------------------
# ``ddp`` hands a CheckpointIO optimizer states that number their parameters, and nothing that tells which
# is which: this callback adds the names. It also takes notice of background saves that have ended.


class ParameterNames:
    """Mixin of a callback that writes ``param_names`` into each saved param group.

    nnx's own strategies save from all ranks and take notice of these saves themselves.

    Attributes:
        root: The tree of Lightning whose callback this is.
    """

    root: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made for one tree, so a spawned process makes it again."""
        return (_make, (self.root,))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Name the parameters of every optimizer state that numbers them."""
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
        """Raise the error of a background save of this rank alone."""
        poll(collective=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let a save of this rank alone get onto the disk, without hiding this error behind its own."""
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
    return [_make(root), make_resume_callback(root)] if exists() else []


def _make(root: str) -> Any:
    base = importlib.import_module(f"{root}.callbacks").Callback
    return type("NnxParameterNames", (ParameterNames, base), {"root": root})()
