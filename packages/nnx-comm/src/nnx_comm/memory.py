"""Count the memory of a rank under the strategies for slow links, for ``nnx plan``."""

from __future__ import annotations

from typing_extensions import override

from nnx_core.planning.replay import Replay

__all__ = ["DiLoCoMemory", "GradientMemory", "WeightMemory"]


class GradientMemory(Replay):
    """A rank that averages gradients: a buffer as large as they are, or the errors of a codec."""

    bar = 0.2

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", sum(map(self.stored_gradient, self.trained)))

    @override
    def end_backward(self) -> None:
        gradients = sum(map(self.stored_gradient, self.trained))
        is_int8 = self.options.get("algorithm") == "bytegrad" or self.options.get("codec") == "int8"
        if (
            is_int8
        ):  # the sum with the errors, its chunks as bytes and as numbers again, measured on two ranks
            self.memory.add_briefly("communication", 5 * gradients)
        else:
            self.copy_by_gloo(gradients)


class WeightMemory(Replay):
    """A rank that averages weights after a step: a buffer as large as they are, from the first average on."""

    bar = 0.2

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", self.kept())

    def kept(self) -> int:
        """Return the bytes that stay between two steps."""
        return sum(map(self.stored, self.trained))

    @override
    def end_step(self) -> None:
        self.copy_by_gloo(sum(map(self.stored, self.trained)))


class DiLoCoMemory(WeightMemory):
    """A rank of DiLoCo: outer weights, their momentum, and the buffer; an exchange takes the changes, too."""

    @override
    def kept(self) -> int:
        return 3 * super().kept()

    @override
    def end_step(self) -> None:
        changes = sum(map(self.stored, self.trained))
        self.memory.add("temporary", changes)
        super().end_step()
        self.memory.add("temporary", -changes)
