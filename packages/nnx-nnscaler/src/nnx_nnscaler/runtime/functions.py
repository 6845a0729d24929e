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
        if dim is None and not self.communicator.threaded:
            return F.dropout(tensor, p, training=True)
        return tensor * self._mask(tensor, p, dim, groups)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        p: float,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        dim: int | None = None,
    ) -> Tensor:
        """Scaled dot product attention with this rank's part of the dropout that one process would draw.

        Args:
            query: Like key and value, the whole or this rank's part.
            key: See there.
            value: See there.
            attn_mask: Added to the scores, or where they count.
            p: Probability of a dropped weight.
            is_causal: Whether a query sees keys up to its own place only.
            scale: What scores are multiplied with; one over the root of the features by default.
            enable_gqa: Whether several query heads share one of key and value.
            dim: Along which dim of the query the result is cut; None if it is whole.
        """
        if dim is None and not self.communicator.threaded:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
        return (weights * self._mask(weights, p, dim)) @ value

    def _mask(self, like: Tensor, p: float, dim: int | None = None, groups: int = 1) -> Tensor:
        """This rank's part of a dropout mask of zeros and ``1 / (1 - p)``."""
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
