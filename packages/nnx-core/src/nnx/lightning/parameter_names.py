"""Parameter names for optimizers that Lightning's own strategies save.

``ddp`` hands a CheckpointIO optimizer states that number their parameters, and nothing that tells
which is which. This callback adds the names. It reaches Trainer through Lightning's public
``callbacks_factory`` entry point, and only when an `nnx.CheckpointIO` exists in the process.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["ParameterNames", "callbacks", "mirror_callbacks"]


class ParameterNames:
    """Mixin of a callback that writes ``param_names`` into each saved param group.

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


def callbacks() -> list[Any]:
    """Entry point for ``lightning.pytorch``."""
    return _callbacks("lightning.pytorch")


def mirror_callbacks() -> list[Any]:
    """Entry point for ``pytorch_lightning``."""
    return _callbacks("pytorch_lightning")


def _callbacks(root: str) -> list[Any]:
    checkpoint_io = sys.modules.get("nnx.lightning.checkpoint_io")
    if checkpoint_io is None or not checkpoint_io.exists():
        return []
    return [_make(root)]


def _make(root: str) -> Any:
    base = importlib.import_module(f"{root}.callbacks").Callback
    return type("NnxParameterNames", (ParameterNames, base), {"root": root})()
