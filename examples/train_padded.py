"""Train a causal language model on texts of different lengths, padded, by the loss of `transformers`.

nnx diff examples/train_padded.py --a ddp@1 --b ddp@2              # an uneven mean
nnx diff examples/train_padded.py --a ddp@1 --b ddp@2 -- --count   # equal
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


class Writer(LightningModule):
    """Trains a small GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the mean loss of the tokens of this rank; with ``--count``, weighted by their number."""
        loss: Tensor = self.model(**batch).loss
        if "--count" in sys.argv:
            count = (batch["labels"][:, 1:] != -100).sum().to(loss)
            loss = loss * count / self.all_gather(count).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    """Put texts into one batch; labels of -100 do not count."""
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


if __name__ == "__main__":
    texts = [torch.randint(1, 99, (int(length),)) for length in torch.randint(4, 32, (64,))]
    Trainer(max_epochs=1).fit(Writer(), DataLoader(texts, batch_size=8, collate_fn=pad))
