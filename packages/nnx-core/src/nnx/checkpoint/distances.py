"""How far apart two pieces of tensor data are: elements that differ in any bit, and the largest distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["NO_DIFFERENCE", "Difference", "difference_of"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two pieces of data.

    Attributes:
        elements: How many elements differ in any bit.
        largest: The largest absolute difference; NaN where only one side is NaN; 0 where only the bits
            differ, as those of 0.0 and -0.0 do.
    """

    elements: int
    largest: float

    def __bool__(self) -> bool:
        return self.elements > 0

    def __add__(self, other: Difference) -> Difference:
        not_a_number = math.isnan(self.largest) or math.isnan(other.largest)
        largest = math.nan if not_a_number else max(self.largest, other.largest)
        return Difference(self.elements + other.elements, largest)


NO_DIFFERENCE = Difference(0, 0.0)


def difference_of(left: memoryview, right: memoryview, dtype: torch.dtype) -> Difference:
    """Compare two pieces of the same length.

    Example:
        >>> data = [memoryview(torch.tensor([1, values]).numpy()).cast("B") for values in (2, 5)]
        >>> difference_of(*data, torch.int64)
        Difference(elements=1, largest=3.0)
    """
    word = min(dtype.itemsize, 8)
    a, b = (np.frombuffer(data, f"u{word}").reshape(-1, dtype.itemsize // word) for data in (left, right))
    if np.array_equal(a, b):
        return NO_DIFFERENCE
    rows = np.flatnonzero((a != b).any(axis=1))
    x, y = (_tensor(bits[rows], dtype) for bits in (a, b))
    if dtype.is_complex or dtype.is_floating_point:
        return Difference(len(rows), _distance(x, y, torch.complex128 if dtype.is_complex else torch.float64))
    return Difference(len(rows), _integer_distance(x, y))


def _tensor(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits.reshape(-1)).view(dtype)


def _distance(x: Tensor, y: Tensor, wide: torch.dtype) -> float:
    x, y = x.to(wide), y.to(wide)
    # What is equal although its bits differ would give NaN as often as 0: infinities, NaNs of two kinds.
    same = (x == y) | (x.isnan() & y.isnan())
    distances = (x - y).abs()[~same]
    return float(distances.max()) if distances.numel() else 0.0


def _integer_distance(x: Tensor, y: Tensor) -> float:
    a, b = (_integers(tensor) for tensor in (x, y))
    # Modulo 2**64 this is exact even where the difference does not fit into 63 bits.
    distances = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return float(distances.max())


def _integers(tensor: Tensor) -> np.ndarray[Any, Any]:
    values = tensor.numpy()
    return values if values.dtype == np.uint64 else values.astype(np.int64)
