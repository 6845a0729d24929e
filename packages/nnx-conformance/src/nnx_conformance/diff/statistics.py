"""Statistics of a tensor that ranks compute on their boxes, and that add up to those of the whole tensor.

A sum and a norm do not change if elements move. A sketch does: it is the product of the tensor with `WIDTH`
random signs for each element. Sketches are linear, so the distance of two tensors, and the sketch of an
update, follow from the sketches alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nnx_base.box import Box

WIDTH = 16
"""The number of signs for each element; distances are known to about 20 %."""
_INNER = 1 << 12
"""The most elements of the last dims whose signs are multiplied out."""
_BLOCK = 1 << 16
"""The elements that a CPU converts at once."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """The statistic of a tensor, or of the boxes of it on one rank.

    Attributes:
        numel: The number of elements.
        total: Their sum.
        square: The sum of their squares.
        nonfinite: The number of infinities and NaN, which count as zero elsewhere.
        sketch: `WIDTH` signed sums.
    """

    numel: int
    total: float
    square: float
    nonfinite: int
    sketch: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(max(self.square, 0.0))

    def __add__(self, other: Statistic) -> Statistic:
        return Statistic(
            self.numel + other.numel,
            self.total + other.total,
            self.square + other.square,
            self.nonfinite + other.nonfinite,
            tuple(a + b for a, b in zip(self.sketch, other.sketch, strict=True)),
        )

    def minus(self, other: Statistic) -> Statistic:
        """Return the statistic of the difference of two tensors; its norm is estimated from the sketch."""
        sketch = tuple(a - b for a, b in zip(self.sketch, other.sketch, strict=True))
        square = sum(value * value for value in sketch) / WIDTH
        nonfinite = abs(self.nonfinite - other.nonfinite)
        return Statistic(self.numel, self.total - other.total, square, nonfinite, sketch)

    def distance(self, other: Statistic) -> float:
        """Estimate the 2-norm of the difference; infinite if only one tensor has non-finite values."""
        difference = self.minus(other)
        return math.inf if difference.nonfinite else difference.norm

    def as_list(self) -> list[float]:
        """Return the numbers for JSON."""
        return [self.numel, self.total, self.square, self.nonfinite, *self.sketch]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> Statistic:
        """Return the statistic of `as_list`."""
        numel, total, square, nonfinite, *sketch = numbers
        return cls(int(numel), total, square, int(nonfinite), tuple(sketch))


ZERO = Statistic(0, 0.0, 0.0, 0, (0.0,) * WIDTH)


def total(statistics: Iterable[Statistic], *, is_estimated: bool = False) -> Statistic:
    """Return the statistic of a tensor from those of its boxes.

    Args:
        statistics: The statistics.
        is_estimated: True for differences, whose norms are estimates that do not add up.
    """
    found = sum(statistics, ZERO)
    return found.minus(ZERO) if is_estimated else found


@torch.no_grad()
def measure(view: Tensor, box: Box, shape: Sequence[int]) -> Statistic:
    """Return the statistic of a box of a tensor.

    Args:
        view: The elements of the box.
        box: Its place in the tensor.
        shape: The shape of the tensor.

    Example:
        >>> whole = torch.arange(6.0).view(3, 2)
        >>> rows = [measure(whole[i : i + 1], Box((i, 0), (1, 2)), (3, 2)) for i in range(3)]
        >>> total(rows).distance(measure(whole, Box.whole((3, 2)), (3, 2)))
        0.0
    """
    data = view.detach()
    if data.is_sparse:
        data = data.to_dense()
    if data.is_complex():
        data = torch.view_as_real(data)
        box, shape = Box((*box.offset, 0), (*box.size, 2)), (*shape, 2)
    numbers, nonfinite = _numbers(data, box, shape), 0
    if not numbers[1].isfinite():
        finite = data.isfinite()
        nonfinite = int(data.numel() - finite.sum())
        numbers = _numbers(torch.where(finite, data, 0.0), box, shape)
    found: list[float] = numbers.tolist()
    return Statistic(data.numel(), found[0], found[1], nonfinite, tuple(found[2:]))


def _numbers(data: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Return the sum, the sum of squares and the sketch."""
    # The signs of an element are a product of one factor for each dim, so that no rank makes signs for more
    # than the edges of its boxes. The last dims are one matrix product, in blocks that stay in the cache.
    first = data.dim() - 1
    while first > 0 and math.prod(data.shape[first - 1 :]) <= _INNER:
        first -= 1
    first = max(first, 0)
    factors = [_factor(dim, box, shape, data.device) for dim in range(data.dim())]
    inner, outer = _product(factors[first:], data.device), _product(factors[:first], data.device)
    rows = data.reshape(len(outer), len(inner))
    height = len(rows) if data.is_cuda else max(1, _BLOCK // max(1, len(inner)))
    found = torch.zeros(WIDTH + 2, dtype=torch.float64, device=data.device)
    for start in range(0, len(rows), max(1, height)):
        values = rows[start : start + height].to(torch.float64)
        flat = values.flatten()
        found[0] += flat.sum()
        found[1] += flat.dot(flat)
        found[2:] += ((values @ inner) * outer[start : start + height]).sum(0)
    return found


def _factor(dim: int, box: Box, shape: Sequence[int], device: torch.device) -> Tensor:
    return _signs(dim, shape[dim], device)[box.offset[dim] : box.offset[dim] + box.size[dim]]


def _product(factors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the products of the factors of some dims, a row for each element."""
    found = torch.ones(1, WIDTH, dtype=torch.float64, device=device)
    for factor in factors:
        found = (found[:, None] * factor).flatten(0, 1)
    return found


@lru_cache(maxsize=256)
def _signs(dim: int, extent: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * dim + 17)
    signs = torch.randint(0, 2, (extent, WIDTH), generator=generator) * 2 - 1
    return signs.to(device=device, dtype=torch.float64)
