"""What `nnx.CheckpointIO` needs to know of a run under Lightning's own strategies.

``ddp`` hands a CheckpointIO optimizer states that number their parameters, and nothing that tells
which is which: this callback adds the names. It also takes notice of background saves that have ended.
It reaches Trainer through Lightning's public ``callbacks_factory`` entry point, and only when an
`nnx.CheckpointIO` exists in the process.
"""

from __future__ import annotations

import importlib
from typing import Any

from nnx_checkpoint.inflight import current, settle_quietly
from nnx_checkpoint.writer import poll
from nnx_core.lightning.checkpoint_io import CheckpointIO, exists
from nnx_core.lightning.resume_callback import make_resume_callback

__all__ = ["ParameterNames", "callbacks", "mirror_callbacks"]


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
