"""Models that nnx-nnscaler has to train as one process does, and the job that trains one of them.

Each is a LightningModule as users write them, so small that tracing takes most of the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH = 8
VOCABULARY = 32
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One training, as data that travels to the workers."""

    model: str
    strategy: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1
    steps: int = 10
    clip: float | None = None


class Batches(Dataset[Batch]):
    """This rank's share of each global batch, in order."""

    def __init__(
        self, batches: list[Batch], *, rank: int, num_replicas: int, size: int = GLOBAL_BATCH
    ) -> None:
        share = size // num_replicas
        self.rows = slice(rank * share, (rank + 1) * share)
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return {name: values[self.rows] for name, values in self.batches[index].items()}


class Model(LightningModule):
    """The common base of all models: data, AdamW, and losses averaged over the ranks.

    Args:
        steps: The number of global batches.
    """

    seeded = False
    """True if training draws random numbers, from a seed that each step sets."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.build()
        generator = torch.Generator().manual_seed(3)
        self.batches = [self.make_batch(generator) for _ in range(steps)]
        self.losses: list[float] = []
        self.validated: list[float] = []

    def build(self) -> None:
        """Make the layers."""
        raise NotImplementedError

    def make_batch(self, generator: torch.Generator) -> Batch:
        """One global batch."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
        return self(**batch).loss

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        if self.seeded:
            torch.manual_seed(1000 + index)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        self.losses.append(_mean(outputs["loss"]))

    def validation_step(self, batch: Batch, index: int) -> None:
        self.validated.append(_mean(self.loss(batch)))

    def train_dataloader(self) -> Any:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return DataLoader(Batches(self.batches, **kwargs), batch_size=None)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _mean(loss: Tensor) -> float:
    mean = loss.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


class MLP(Model):
    def build(self) -> None:
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

    def make_batch(self, generator: torch.Generator) -> Batch:
        x = torch.randn(GLOBAL_BATCH, 8, generator=generator)
        return {"x": x, "y": x.sin().roll(1, dims=1)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


class CNN(Model):
    """Batch normalization: its statistics are those of the batch that one replica sees."""

    def build(self) -> None:
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),  # which has no gradient in front of a norm
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 4)

    def make_batch(self, generator: torch.Generator) -> Batch:
        return {
            "images": torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator),
            "labels": torch.randint(4, (GLOBAL_BATCH,), generator=generator),
        }

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["images"]), batch["labels"])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(Model):
    """Tied embeddings, a fused projection, and dropout in training."""

    seeded = True
    dropout = 0.1

    def build(self) -> None:
        width = 16
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(self.dropout)
        self.blocks = nn.ModuleList(Block(width, 4, self.dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def make_batch(self, generator: torch.Generator) -> Batch:
        return {"ids": torch.randint(VOCABULARY, (GLOBAL_BATCH, 9), generator=generator)}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


class PlainGPT(GPT):
    """A GPT without dropout, so that replicas compute the results of one process."""

    seeded = False
    dropout = 0.0


def _ids(generator: torch.Generator, length: int = 8) -> Tensor:
    return torch.randint(3, VOCABULARY, (GLOBAL_BATCH, length), generator=generator)


def _padding(length: int = 8) -> Tensor:
    """As many padded positions for every rank, so that the mean of means is the mean."""
    lengths = [length, length - 2] * (GLOBAL_BATCH // 2)
    return torch.tensor([[1] * n + [0] * (length - n) for n in lengths])


class CausalLM(Model):
    """A causal language model of transformers, with a padding mask; labels are the ids themselves."""

    def make_batch(self, generator: torch.Generator) -> Batch:
        ids, mask = _ids(generator), _padding()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.net(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


class GPT2(CausalLM):
    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=4, **off)
        self.net = GPT2LMHeadModel(config)


class Llama(CausalLM):
    def build(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.net = LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **heads)
        )


class BERT(Model):
    def build(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, num_labels=4, **sizes, **off)
        self.net = BertForSequenceClassification(config)

    def make_batch(self, generator: torch.Generator) -> Batch:
        labels = torch.randint(4, (GLOBAL_BATCH,), generator=generator)
        return {"input_ids": _ids(generator), "attention_mask": _padding(), "labels": labels}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.net(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class ViT(Model):
    def build(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = ViTConfig(image_size=8, patch_size=4, num_channels=3, num_labels=4, **sizes, **off)
        self.net = ViTForImageClassification(config)

    def make_batch(self, generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator),
            "labels": torch.randint(4, (GLOBAL_BATCH,), generator=generator),
        }

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return self.net(pixel_values=pixel_values, labels=labels)


class T5(Model):
    def build(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        self.net = T5ForConditionalGeneration(config)

    def make_batch(self, generator: torch.Generator) -> Batch:
        return {
            "input_ids": _ids(generator),
            "attention_mask": _padding(),
            "labels": _ids(generator, length=6),
        }

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.net(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


class UNet(Model):
    """Skips from the way down to the way up, and a forward that returns its loss."""

    def build(self) -> None:
        self.into = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)])
        self.middle = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 8, 2, 2)])
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def make_batch(self, generator: torch.Generator) -> Batch:
        return {"x": torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)}

    def picture(self, x: Tensor) -> Tensor:
        kept = [self.into(x).relu()]
        for layer in self.down:
            kept.append(layer(kept[-1]).relu())
        y = self.middle(kept.pop())
        for layer in self.up:
            y = torch.cat([layer(y).relu(), kept.pop()], 1)
        return self.out(y)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.picture(x), x)

    def loss(self, batch: Batch) -> Tensor:
        return self(**batch)


class GPTWithLoss(GPT):
    """A forward that returns its loss beside the scores; `GPT` computes it in the step."""

    def build(self) -> None:
        super().build()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        scores = super().forward(ids)
        return {"loss": F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "scores": scores}

    def loss(self, batch: Batch) -> Tensor:
        return self(batch["ids"])["loss"]


class LossInStep(CausalLM):
    """The same models with the loss in the step, as where it is not the model's own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class GPT2LossInStep(LossInStep, GPT2):
    pass


class LlamaLossInStep(LossInStep, Llama):
    pass


class T5LossInStep(T5):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.net(**given, decoder_input_ids=decoder_input_ids, use_cache=False).logits

    def loss(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        scores = self(batch["input_ids"], batch["attention_mask"], F.pad(labels, (1, -1)))
        return F.cross_entropy(scores.transpose(1, 2), labels)


class UNetLossInStep(UNet):
    forward = UNet.picture

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["x"])


OF_PIPELINES: dict[str, Callable[[int], Model]] = {
    "gpt_with_loss": GPTWithLoss,
    "gpt2_loss_in_step": GPT2LossInStep,
    "llama_loss_in_step": LlamaLossInStep,
    "t5_loss_in_step": T5LossInStep,
    "unet": UNet,
    "unet_loss_in_step": UNetLossInStep,
}
"""Models besides, for pipelines."""
MODELS: dict[str, Callable[[int], Model]] = {
    "mlp": MLP,
    "cnn": CNN,
    "gpt": GPT,
    "plain_gpt": PlainGPT,
    "gpt2": GPT2,
    "llama": Llama,
    "bert": BERT,
    "vit": ViT,
    "t5": T5,
}


def losses_of(case: Case) -> tuple[list[float], list[float]]:
    """Train a model; the losses of every step, and those of two batches on which it is validated."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module = (MODELS | OF_PIPELINES)[case.model](case.steps)
    trainer = Trainer(
        strategy=make_strategy(case.strategy, case.options),
        accelerator="cpu",
        devices=case.devices,
        max_epochs=1,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=case.clip,
    )
    trainer.fit(module)
    return module.losses, module.validated


def make_strategy(name: str, options: Mapping[str, Any]) -> Any:
    """A name, or the strategy with options."""
    if not options:
        return name
    import nnx

    return nnx.strategy(name, **options)
