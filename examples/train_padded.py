"""Fine-tune a causal language model on texts of different lengths, padded, by the loss of `transformers`.

nnx diff examples/train_padded.py --a ddp@1 --b ddp@2
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


class Writer(LightningModule):
    """Trains a small GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, **rates))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the mean loss of all words that are no padding."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    """Put texts into one batch."""
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    return {"input_ids": padded, "labels": padded.masked_fill(padded == 0, -100)}


if __name__ == "__main__":
    lengths = torch.randint(4, 32, (64,)).tolist()
    texts = [torch.randint(1, 99, (length,)) for length in lengths]
    Trainer(max_epochs=1).fit(Writer(), DataLoader(texts, batch_size=8, collate_fn=pad))
