"""Host memory that a card can read by itself, in exactly the size that was asked for.

torch's own pinned memory is rounded up to a power of two, which for the masters of a large model may be as
much again, and it is never given back to the system. So memory is taken from the system as usual, made known
to the driver, and made unknown before it is freed, whoever refers to it last.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_WORTH_REGISTERING = 2**20
"""Bytes from which on host memory is pinned exactly, not rounded up to a power of two."""


def pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """A new 1-d tensor, not initialised, in memory that CUDA copies from and to by itself.

    Args:
        numel: The number of elements.
        dtype: The dtype of the elements.
    """
    exact = None
    with torch.inference_mode(False):
        if numel * dtype.itemsize >= _WORTH_REGISTERING:
            exact = registered_empty(numel, dtype, register=_register, unregister=_unregister)
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True) if exact is None else exact


def registered_empty(
    numel: int,
    dtype: torch.dtype,
    *,
    register: Callable[[int, int], bool],
    unregister: Callable[[int], object],
) -> Tensor | None:
    """A new 1-d tensor, not initialised, in memory that the driver knows until the memory is freed.

    torch's host allocator does not know it: nothing keeps it for a plain ``copy_(non_blocking=True)``, so
    whoever copies so has to refer to it until the copy is over.

    Args:
        numel: Elements.
        dtype: The dtype of the elements.
        register: Makes memory known, given address and bytes; whether it did.
        unregister: Makes it unknown again, given the address.

    Returns:
        The tensor; None if the driver refused.
    """
    # Whole pages of its own: a driver may refuse a page that another registered array has a part of.
    memory = np.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=np.uint8)
    address = memory.ctypes.data
    if not register(address, memory.nbytes):
        return None
    # Storages cannot be watched, but numpy tells of an array's end while its memory is still there, and the
    # storage refers to the array.
    finalizer = weakref.finalize(memory, unregister, address)
    finalizer.atexit = False  # the driver may be gone by then
    return torch.from_numpy(memory).view(dtype)


def _register(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:  # type: ignore[no-untyped-call]
        return True
    _clear_last_error()
    return False


def _clear_last_error() -> None:
    """Let a launch of our own raise what a refused call has left, or somebody else's next one would.

    torch gives no other access to ``cudaGetLastError``.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
