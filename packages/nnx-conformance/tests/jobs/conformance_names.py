"""Strategies that declare less than others, for the tests of the conformance suite's verdicts.

Workers import this module because the tests name it in ``imports``; importing it registers the names.
"""

from __future__ import annotations

from typing import Any

import nnx
from nnx_tiny.backend import TinyBackend


class ForgetsClipping(TinyBackend):
    """Leaves gradients unclipped, although the user asked for clipping."""

    def clip_grad_norm(self, optimizer: Any, max_norm: float, **kwargs: Any) -> Any:
        return super().clip_grad_norm(optimizer, float("inf"), **kwargs)


class SumsGradients(TinyBackend):
    """Adds gradients up over the ranks where it should average them."""

    def backward(self, module: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.context.world_size, *args, **kwargs)


class Stumbles(TinyBackend):
    """Does not survive its first call."""

    def parallelize(self, module: Any, sample: object) -> Any:
        raise RuntimeError("planted in the engine")


_UNCLIPPED = nnx.Capabilities(clip_by_norm=False)

nnx.StrategyRegistry.register("modest", TinyBackend, capabilities=_UNCLIPPED, override=True)
nnx.StrategyRegistry.register("forgetful", ForgetsClipping, capabilities=_UNCLIPPED, override=True)
