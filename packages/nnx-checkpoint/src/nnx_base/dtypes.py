"""Names of element types."""

from __future__ import annotations

from functools import cache

import torch


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type without `torch.`: ``"float32"``."""
    return str(dtype).removeprefix("torch.")
