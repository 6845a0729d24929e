"""Hooks on the modules that use working weights; they stay behind when a module is copied or pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nnx_colossalai.chunks.local_chunk import LocalChunk
from nnx_colossalai.chunks.local_step import Step

__all__ = ["Enter", "Leave"]


class _Hook:
    """Belongs to one module: a copy has parameters of its own, which lie in no chunk."""

    is_of_chunks = True

    def __reduce__(self) -> Any:
        return _hook_of_copies, ()


class Enter(_Hook):
    """A forward begins.

    Args:
        step: Of the engine.
        chunks: That the module uses.
        dtype: What its floating-point inputs are cast to, if anything.

    Attributes:
        inner: Hooks of modules inside that do nothing while it runs: those before forwards, and those after.
    """

    def __init__(self, step: Step, chunks: Sequence[LocalChunk], dtype: torch.dtype | None) -> None:
        self._step, self._chunks, self._dtype = step, chunks, dtype
        self.inner: tuple[list[RemovableHandle], list[RemovableHandle]] = ([], [])

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the forward is called with instead, if that is anything else."""
        return self._step.enter(self._chunks, self._dtype, module, args, kwargs, inner=self.inner)


class Leave(_Hook):
    """A forward is over, well or not.

    Args:
        step: Of the engine.
    """

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing is changed of its output."""
        self._step.leave(module, output)


def _nothing(*_: Any) -> None:
    """What a copied module has in a hook's place."""


def _hook_of_copies() -> Any:
    return _nothing
