"""What torch has under other names in some of the versions that this package supports."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 calls them all_gather_single and reduce_scatter_single, and warns about the names that 2.11 has.
_new: Any = dist
all_gather_into = getattr(_new, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(_new, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
