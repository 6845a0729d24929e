"""Which elements of a parameter this rank holds between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nnx_checkpoint.shard import Shard, shard_of_range


@dataclass(slots=True, eq=False)
class Piece:
    """A parameter of the user's, and the range of it that this rank holds.

    Attributes:
        parameter: The user's own object; between steps its data are this rank's elements.
        shape: Shape of the whole parameter.
        start: Flat index, in the whole parameter, of the first element held here.
        length: Number of elements held here; tensors of the parameter may have padding behind them.
        begin: Flat index, in the tensor that is communicated, of the whole parameter's first element.
        places: The modules that hold the parameter, each with the name it has there.
        shown: The tensor that is in its places while it is gathered.
    """

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    length: int
    begin: int = 0
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    shown: Tensor | None = None

    def is_in_place(self) -> bool:
        """Whether the modules that held the parameter still do, it or what is shown of it."""
        there = [owner._parameters.get(name) for owner, name in self.places]
        return all(held is not None and (held is self.parameter or held is self.shown) for held in there)

    def shard(self, tensor: Tensor) -> Shard:
        """Where a tensor with this rank's elements, of the parameter or of its optimizer state, lies."""
        return shard_of_range(tensor.detach()[: self.length], shape=self.shape, start=self.start)


def cut(begin: int, numel: int, *, low: int, high: int) -> tuple[int, int]:
    """Of a parameter at ``[begin, begin + numel)`` of a flat tensor, what lies in ``[low, high)``.

    Returns:
        Where that begins in the parameter, and its length.

    Example:
        >>> cut(4, 6, low=7, high=14), cut(4, 6, low=12, high=14)
        ((3, 3), (0, 0))
    """
    first, last = max(begin, low), min(begin + numel, high)
    return (first - begin, last - first) if last > first else (0, 0)
