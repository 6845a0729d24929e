"""Which copy of Lightning a class that is made for its Trainer belongs to."""

from __future__ import annotations

import sys

__all__ = ["trainer_tree"]

_TREES = ("lightning.pytorch", "pytorch_lightning")


def trainer_tree() -> str:
    """Root of the copy whose Trainer this process uses: the first that is imported."""
    return next((root for root in _TREES if f"{root}.strategies" in sys.modules), _TREES[0])
