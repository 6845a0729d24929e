"""Count the memory of a rank under the strategies for slow links, for ``nnx plan``."""

from __future__ import annotations

from typing_extensions import override

from nnx_core.planning.replay import Replay
from nnx_fsdp.memory import FSDPMemory

__all__ = [
    "AsyncMemory",
    "DiLoCoMemory",
    "GradientMemory",
    "HybridMemory",
    "LowPrecisionMemory",
    "WeightMemory",
]


class GradientMemory(Replay):
    """A rank that averages gradients: a buffer as large as they are, or the errors of a codec."""

    bar = 0.2

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", self.gradients)

    @override
    def end_backward(self) -> None:
        if self.options.get("algorithm") == "bytegrad" or self.options.get("codec") == "int8":
            # The sum with the errors, its chunks as bytes and as numbers again: measured on two ranks.
            self.memory.add_briefly("communication", 5 * self.gradients)
        else:
            self.copy_by_gloo(self.gradients)


class HybridMemory(FSDPMemory):
    """A rank of FSDP2 that exchanges its shard of the gradients: the errors, and the codec's rows."""

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", self.gradients)

    @override
    def end_backward(self) -> None:
        super().end_backward()
        self.memory.add_briefly("communication", 5 * self.gradients)


class WeightMemory(Replay):
    """A rank that averages weights after a step: a buffer as large as they are, from the first average on."""

    bar = 0.2
    buffers = 1
    """The tensors of each weight's size that stay between two steps."""

    @property
    def weights(self) -> int:
        """The bytes of all trained weights on this rank."""
        return sum(map(self.stored, self.trained))

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", self.buffers * self.weights)

    @override
    def end_step(self) -> None:
        self.copy_by_gloo(self.weights)


class DiLoCoMemory(WeightMemory):
    """A rank of DiLoCo: outer weights, their momentum, and the buffer; an exchange takes the changes, too."""

    buffers = 3

    @override
    def end_step(self) -> None:
        self.memory.add("temporary", self.weights)
        super().end_step()
        self.memory.add("temporary", -self.weights)


class LowPrecisionMemory(WeightMemory):
    """A rank on a ring: three copies of the weights; an exchange takes their change, coded and decoded."""

    buffers = 3

    @override
    def end_step(self) -> None:
        self.memory.add_briefly("communication", 4 * self.weights)


class AsyncMemory(WeightMemory):
    """A rank whose weights travel while it trains: they, and the average to come."""

    buffers = 2
