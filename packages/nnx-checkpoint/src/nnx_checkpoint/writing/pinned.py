"""Allocate pinned host memory of exactly the requested size.

torch rounds pinned memory up to a power of two, which can double the FP32 master weights of a large model.
It never returns that memory to the system. So this module allocates pageable memory, registers it with the
driver, and unregisters it when its last reference goes, before the memory is freed.
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
"""Bytes above which host memory is pinned exactly, not rounded up to a power of two."""


def pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a new 1-d tensor, not initialised, in pinned memory.

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
    """Return a new 1-d tensor, not initialised, in memory that stays registered until it is freed.

    torch's host allocator does not manage this memory, and does not keep it alive for a
    ``copy_(non_blocking=True)``. The caller must keep a reference until the copy is complete.

    Args:
        numel: The number of elements.
        dtype: The dtype of the elements.
        register: Function of address and bytes that registers the memory, and returns True on success.
        unregister: Function of the address that unregisters the memory.

    Returns:
        The tensor; None if the driver refused.
    """
    # Allocate full pages: a driver may refuse a page that also holds another registered array.
    memory = np.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=np.uint8)
    address = memory.ctypes.data
    if not register(address, memory.nbytes):
        return None
    # torch has no callback for the end of a storage. numpy has one for an array, which runs before the memory
    # is freed, and the storage refers to the array.
    finalizer = weakref.finalize(memory, unregister, address)
    finalizer.atexit = False  # the driver may already be shut down
    return torch.from_numpy(memory).view(dtype)


def _register(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:  # type: ignore[no-untyped-call]
        return True
    _clear_last_error()
    return False


def _clear_last_error() -> None:
    """Clear the error of a refused call by a launch of our own; otherwise an unrelated launch would raise it.

    torch gives no other access to ``cudaGetLastError``.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
