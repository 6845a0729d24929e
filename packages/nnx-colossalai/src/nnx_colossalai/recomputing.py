"""Activation checkpointing of chosen layers: their forwards are replaced on the instances, and put back.

No name in the model changes, and hooks on the layers, those of chunks among them, stay outside of what is
recomputed.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from nnx.layer_classes import as_classes

__all__ = ["Recomputing"]


class Recomputing:
    """Layers whose activations are computed again in backward instead of being kept.

    Args:
        root: The model.
        classes: A layer class or several; None: none.

    Raises:
        OptionError: Something in `classes` is not a module class.
    """

    def __init__(self, root: nn.Module, classes: object) -> None:
        wanted = as_classes(classes or (), option="activation_checkpointing")  # type: ignore[arg-type]
        self.layers = [module for module in root.modules() if isinstance(module, wanted)]
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def undo(self) -> None:
        """Give the layers their own forward back."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []
