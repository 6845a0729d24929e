"""The private names of torch that checkpoints rely on, each with the versions it was checked with.

Nothing else in `nnx.checkpoint` uses a private name. `test_torch_compat.py` holds each to its use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnx.layout import Shard

__all__ = ["Checkpointable"]


class Checkpointable(Tensor):
    """A tensor without data that stands for a shard of a larger one.

    `torch.Tensor._make_wrapper_subclass` (torch 2.11 to 2.13) makes it; `torch.distributed.checkpoint` asks
    tensors for the methods ``__create_write_items__``, ``__create_chunk_list__`` and
    ``__get_tensor_shard__`` of its private protocol `_Checkpointable` (torch 2.11 to 2.13).
    """

    shard: Shard

    @staticmethod
    def __new__(cls: type[Checkpointable], shard: Shard) -> Checkpointable:
        device = shard.data[0].device if shard.data else torch.device("cpu")
        made: Checkpointable = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shard.shape), dtype=shard.dtype, device=device
        )
        made.shard = shard
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={self.shard.shape}, boxes={list(self.shard.boxes)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse arithmetic: there is no data here."""
        raise TypeError(f"{cls.__name__} stands for a shard in a state dict and cannot compute {func}")
