"""Host memory that a card can read by itself, in exactly the size that was asked for.

torch's own pinned memory is rounded up to a power of two, which for the masters of a large model may be as
much again. So memory is taken from the host as usual, made known to the driver, and made unknown before it
is freed, whoever refers to it last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["registered_empty"]


def registered_empty(
    numel: int,
    dtype: torch.dtype,
    *,
    register: Callable[[int, int], bool],
    unregister: Callable[[int], object],
) -> Tensor | None:
    """A new 1-d tensor, not initialised, in memory that the driver knows until the memory is freed.

    Args:
        numel: Elements.
        dtype: Of the elements.
        register: Makes memory known, given address and bytes; whether it did.
        unregister: Makes it unknown again, given the address.

    Returns:
        The tensor; None if the driver refused.
    """
    memory = np.empty(numel * dtype.itemsize, dtype=np.uint8)
    address = memory.ctypes.data
    if not register(address, memory.nbytes):
        return None
    # Storages cannot be watched, but numpy tells of an array's end while its memory is still there, and the
    # storage refers to the array.
    weakref.finalize(memory, unregister, address)
    return torch.from_numpy(memory).view(dtype)
