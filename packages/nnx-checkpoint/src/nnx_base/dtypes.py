"""Name element types, and view elements as bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type without `torch.`: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order as a flat tensor of uint8 (copy only if not contiguous).

    Example:
        >>> as_bytes(torch.ones(2, 2, dtype=torch.int16).t()).tolist()
        [1, 0, 1, 0, 1, 0, 1, 0]
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    # A dim of one element may have any stride: `reshape` keeps it, and a view as bytes refuses it.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
