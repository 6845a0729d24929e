"""A decoder-only transformer in plain PyTorch.

Owns the network and nothing else: no Lightning, no nnx, no device, no data. That it can be sharded
is nobody's concern here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

__all__ = ["GPT", "Block", "GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of a model."""

    vocabulary: int = 256
    """The number of tokens; 256 for plain bytes."""
    context: int = 128
    """The longest sequence the model can look back on, in tokens."""
    layers: int = 4
    """The number of transformer blocks."""
    heads: int = 4
    """Attention heads per block; divides `width`."""
    width: int = 128
    """Size of the vector that represents one token."""


class Block(nn.Module):
    """Attention, then a feed-forward network, each behind a layer norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, sequence, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        # (batch, sequence, 3 * width) -> three of (batch, heads, sequence, width / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(-2))
        return projected


class GPT(nn.Module):
    """Predicts every next token from those before it.

    Example:
        >>> model = GPT(GPTConfig(context=8, layers=1, heads=2, width=16))
        >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
        torch.Size([3, 8, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_init_weights)
        self.head.weight = self.token_embedding.weight  # tied: one parameter, two names

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
