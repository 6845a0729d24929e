"""Operators as emitted programs call them where the plain operator would be wrong on a rank's part.

Each takes this rank's parts and makes this rank's part of the result. The arithmetic is torch's own; what is
added is which part of a mask, of a count or of a table a rank has to look at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 # the field writes it so
from torch import Tensor

from nnx_nnscaler.runtime.conversions import Conversions

__all__ = ["Functions"]


class Functions(Conversions):
    """Addends, random numbers and tables in parts."""

    def once(self, tensor: Tensor) -> Tensor:
        """An addend to partial sums: itself on the first rank, zeros on the others."""
        return tensor if self.rank == 0 else tensor * 0

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """Random numbers that all ranks share; every rank's generator moves on alike."""
        return self.communicator.drawn(draw)

    def dropout(self, tensor: Tensor, p: float, dim: int | None = None, groups: int = 1) -> Tensor:
        """Dropout with this rank's part of the mask that one process would have drawn.

        Args:
            tensor: The value, or this rank's part of it.
            p: Probability of a zero.
            dim: Along which dim it is cut; None if it is whole.
            groups: In how many groups.
        """
        return tensor * self.dropout_mask(tensor, p, dim, groups)

    def dropout_mask(self, like: Tensor, p: float, dim: int | None = None, groups: int = 1) -> Tensor:
        """This rank's part of a mask of zeros and ``1 / (1 - p)``."""
        shape = list(like.shape)
        if dim is not None:
            shape[dim] *= self.size
        ones = torch.ones(shape, dtype=like.dtype, device=like.device)
        mask = self.drawn(lambda: F.dropout(ones, p, training=True))
        return mask if dim is None else self.part(mask, dim, groups)

    def embedding_rows(self, weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
        """Summands of an embedding whose table is cut by rows: zeros for indices in other ranks' rows.

        Args:
            weight: This rank's rows.
            indices: Rows of the whole table.
            padding_idx: The row of the whole table that gets no gradient; -1 for none.
        """
        rows = weight.shape[0]
        local = indices - self.rank * rows
        mine = (local >= 0) & (local < rows)
        padding = padding_idx - self.rank * rows
        found = F.embedding(
            torch.where(mine, local, 0), weight, padding if padding_idx >= 0 and 0 <= padding < rows else None
        )
        return found.masked_fill(~mine.unsqueeze(-1), 0)
