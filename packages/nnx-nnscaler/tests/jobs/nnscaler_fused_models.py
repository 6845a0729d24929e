"""Two small transformers with fused projections, in the two usual forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def tokens(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up samples and labels."""
    generator = torch.Generator().manual_seed(batch)
    return tuple(torch.randint(0, 32, (batch, 8), generator=generator) for _ in range(2))


class Fused(nn.Module):
    """A layer with learned positions, a fused projection, fused attention with dropout, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.norm1, self.norm2, self.last = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 3 * 32), nn.Linear(32, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(32, dim=2)
        q, k, v = (part.view(batch, length, 8, 4).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        y = self.out(y.transpose(1, 2).contiguous().view(batch, length, 32))
        x = x + F.dropout(y, 0.2, self.training)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.2, self.training)
        scores = self.head(self.last(x))
        return scores, F.cross_entropy(scores.view(-1, 32), labels.view(-1), label_smoothing=0.1)


class Grouped(nn.Module):
    """Keys and values in one tensor, heads that share them, rotary positions, relative bias, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.fused, self.query = nn.Linear(16, 2 * 16, bias=False), nn.Linear(16, 32)
        self.out, self.gate, self.down = nn.Linear(32, 16), nn.Linear(16, 64), nn.Linear(32, 16)
        self.scale, self.bias = nn.Parameter(torch.ones(16)), nn.Embedding(8, 8)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def attend(self, x):
        batch, length, _ = x.shape
        key, value = self.fused(x).view(batch, length, 2, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        query = self.query(x).view(batch, length, 8, 4).transpose(1, 2)
        low, high = query.chunk(2, -1)
        angle = torch.arange(length, device=x.device)[:, None] * 0.3
        query = query * angle.cos() + torch.cat((-high, low), -1) * angle.sin()
        key, value = (
            t[:, :, None].expand(batch, 4, 2, length, 4).reshape(batch, 8, length, 4) for t in (key, value)
        )
        distance = torch.arange(length, device=x.device)
        bias = self.bias((distance[:, None] - distance).abs()).permute(2, 0, 1)[None]
        scores = query @ key.transpose(-2, -1) / 2 + bias
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        y = F.dropout(weights, 0.2, self.training) @ value
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, ids, labels):
        x = self.tokens(ids)
        x = x + self.attend(self.norm(x))
        left, right = self.gate(self.norm(x)).split(32, -1)
        x = x + self.down(F.silu(left) * right)
        scores = F.linear(self.norm(x), self.tokens.weight)[:, :-1]
        return scores.mean(), F.cross_entropy(scores.transpose(1, 2), labels[:, 1:], ignore_index=3)
