# ruff: noqa: D101, D102, D103, N812
"""Small models of unlike shape, for `plan_truth.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Model(pl.LightningModule):
    """A model with a loss and a random batch."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def batch(self, size: int) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tokens(size: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, words, (size, length)), torch.randint(0, words, (size, length))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = (
            part.view(size, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(Model):
    def __init__(self, layers: int = 8, width: int = 192, words: int = 1000, length: int = 96) -> None:
        super().__init__()
        self.words, self.length = words, length
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def batch(self, size: int = 4) -> tuple[Tensor, ...]:
        return tokens(size, self.length, self.words)


class CNN(Model):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(256 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))

    def batch(self, size: int = 8) -> tuple[Tensor, ...]:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


class LSTM(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])

    def batch(self, size: int = 8) -> tuple[Tensor, ...]:
        return tokens(size, 32, 1000)


class UNet(Model):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 48, 3, padding=1), nn.Conv2d(48, 96, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(96, 192, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(192, 96, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(192, 48, 2, stride=2)
        self.out = nn.Conv2d(96, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(one))
        x = F.relu(self.up2(F.relu(self.middle(two))))
        x = F.relu(self.up1(torch.cat([x, two], 1)))
        return self.out(torch.cat([x, one], 1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def batch(self, size: int = 4) -> tuple[Tensor, ...]:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 5, (size, 32, 32))


class DLRM(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20000, 32, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(160, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        parts = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(x), *parts], 1)).squeeze(1)

    def loss(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(x, ids), y)

    def batch(self, size: int = 64) -> tuple[Tensor, ...]:
        return torch.randn(size, 16), torch.randint(0, 20000, (size, 4, 8)), torch.rand(size)


class MoE(Model):
    """Every expert computes every token, and a gate weighs them: shapes do not depend on data."""

    def __init__(self, width: int = 128, words: int = 500) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(words, width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        gates = self.gate(x).softmax(-1)
        return self.head(sum(gates[..., [at]] * expert(x) for at, expert in enumerate(self.experts)))

    def batch(self, size: int = 8) -> tuple[Tensor, ...]:
        return tokens(size, 64, 500)


class HuggingFace(Model):
    """A model of transformers, without weights of anyone."""

    words = 800

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make()

    def make(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(input_ids=x, labels=y).loss

    def batch(self, size: int = 4) -> tuple[Tensor, ...]:
        return tokens(size, 64, self.words)


class Llama(HuggingFace):
    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.words,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=7,
            num_attention_heads=6,
            num_key_value_heads=2,
            use_cache=False,
        )
        return LlamaForCausalLM(config)


class BERT(HuggingFace):
    def make(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=self.words,
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=7,
            num_attention_heads=6,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForMaskedLM(config)


class T5(HuggingFace):
    def make(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=self.words,
            d_model=192,
            d_kv=32,
            d_ff=512,
            num_layers=6,
            num_heads=6,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        config.use_cache = False
        return T5ForConditionalGeneration(config)


class ViT(Model):
    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=7,
            num_attention_heads=6,
            image_size=32,
            patch_size=4,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = ViTForImageClassification(config)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(pixel_values=x, labels=y).loss

    def batch(self, size: int = 8) -> tuple[Tensor, ...]:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


MODELS: dict[str, type[Model]] = {
    model.__name__: model for model in (GPT, CNN, LSTM, UNet, DLRM, MoE, Llama, BERT, T5, ViT)
}
