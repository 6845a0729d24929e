"""Small models with graphs like those of real ones, for tests of generated code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, CONTEXT = 32, 16, 8


class Attention(nn.Module):
    """Causal attention with a fused projection of query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A language model whose head and embedding are one; with labels it returns the loss as well."""

    def __init__(self, *, layers: int = 2, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """Convolutions with batch norm; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, images, labels=None):
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        logits = self.head(x.flatten(1))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


class Experts(nn.Module):
    """Two experts, each on the rows that a router sends it: sizes depend on the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if rows.numel() > 0:
                result = result.index_add(0, rows, expert(x[rows]))
        return result


class Mixture(nn.Module):
    """Layers that can be split around one that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 16), Experts(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.experts(torch.relu(self.first(x))))


def tokens(batch: int = 4, seed: int = 0):
    """A batch of token ids."""
    return torch.randint(0, VOCABULARY, (batch, CONTEXT), generator=torch.Generator().manual_seed(seed))


def images(batch: int = 4, seed: int = 0):
    """A batch of images and labels."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 8, 8, generator=drawn), torch.randint(0, 4, (batch,), generator=drawn)
