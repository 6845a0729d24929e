"""A decoder with the shapes of Llama 2, for the meta device at full size, or small for any device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        y = self.norm1(x)
        q, k, v = (
            linear(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """By default Llama 2 7B: 6,738,415,616 parameters."""

    def __init__(
        self, dim=4096, heads=32, inner=11008, layers=32, words=32000, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def llama2_7b(*, recompute: bool = False) -> Llama:
    with torch.device("meta"):
        return Llama(recompute=recompute)
