"""Fine-tune silero-vad, a detector of speech: safetensors in, training, safetensors out.

    python examples/train_speech.py              # two processes, fsdp_auto, 40 steps

The weights come from the package silero-vad (`pip install silero-vad`), and the sounds are generated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx
from nnx_checkpoint import convert

__all__ = ["Detector", "main", "sounds", "weights"]

CONTEXT, CHUNK, RATE = 64, 512, 16_000


class Detector(LightningModule):
    """Silero's network for 16 kHz, under the names of its safetensors file."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False).requires_grad_(False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, sound: Tensor) -> Tensor:
        """Return the logit of speech for each chunk of 512 samples; 64 zeros stand before the first."""
        state: tuple[Tensor, Tensor] | None = None
        logits = []
        for chunk in nn.functional.pad(sound, (CONTEXT, 0)).unfold(1, CONTEXT + CHUNK, CHUNK).unbind(1):
            waves = self.stft_conv(nn.functional.pad(chunk, (0, CONTEXT), "reflect").unsqueeze(1))
            hidden = (waves[:, :129] ** 2 + waves[:, 129:] ** 2).sqrt()
            for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
                hidden = layer(hidden).relu()
            state = self.lstm_cell(hidden.squeeze(-1), state)
            logits.append(self.final_conv(state[0].relu().unsqueeze(-1)).flatten())
        return torch.stack(logits, 1)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """Return the loss of a batch, whose labels hold for every chunk."""
        is_voice, logits = batch[1], self(batch[0])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, is_voice[:, None].expand_as(logits))
        if self.trainer.is_global_zero and index % 10 == 0:
            print(f"step {index}: loss {loss:.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW over the trained parameters."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-4)


def weights() -> Path:
    """The safetensors file that the package ships."""
    return Path(str(files("silero_vad") / "data" / "silero_vad_16k.safetensors"))


def sounds(count: int, chunks: int, seed: int) -> TensorDataset:
    """Voices in turn with noise and tones: a voice is pulses of a drifting pitch through three resonances."""
    generator = torch.Generator().manual_seed(seed)
    time, number = torch.arange(chunks * CHUNK) / RATE, torch.arange(count)[:, None]
    pitch = torch.empty(count, 1).uniform_(90, 250, generator=generator)
    phase = (pitch * (1 + 0.1 * torch.sin(2 * torch.pi * 3 * time)) / RATE).cumsum(1)
    harmonics = torch.arange(1, 20)[:, None, None]
    resonances = sum(torch.exp(-(((harmonics * pitch - peak) / 150) ** 2)) for peak in (500, 1500, 2500))
    voices = (resonances * torch.sin(2 * torch.pi * harmonics * phase)).sum(0) * 0.1
    noise = torch.randn(count, len(time), generator=generator)
    others = torch.where(number % 4 == 0, 0.3 * torch.sin(2 * torch.pi * 4 * pitch * time), 0.1 * noise)
    return TensorDataset(
        torch.where(number % 2 == 1, voices + 0.01 * noise, others), (number[:, 0] % 2).float()
    )


def main(arguments: Sequence[str] | None = None) -> Detector:
    """Train, write ``speech.safetensors``, and compare its outputs with those of the trained module."""
    parser = argparse.ArgumentParser(description="Fine-tune silero-vad.")
    parser.add_argument("--strategy", default="fsdp_auto", help="any name that `nnx list` shows")
    parser.add_argument("--devices", type=int, default=2, help="number of CPU processes")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("out/speech"), help="directory of all output")
    given = parser.parse_args(arguments)

    seed_everything(0, verbose=False)
    detector = nnx.load_from_checkpoint(Detector, weights())
    where: dict[str, Any] = {"strategy": given.strategy, "accelerator": "cpu", "devices": given.devices}
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(max_steps=given.steps, **where, **quiet)
    trainer.fit(detector, DataLoader(sounds(8 * given.devices * given.steps, 8, seed=1), batch_size=8))
    trainer.save_checkpoint(given.out / "last.ckpt")
    if trainer.is_global_zero:
        exported = given.out / "speech.safetensors"
        convert(given.out / "last.ckpt", exported, to="safetensors")
        fresh = Detector()
        fresh.load_state_dict(load_file(exported))
        sound, is_voice = sounds(32, 8, seed=2)[:]
        with torch.no_grad():
            expected, logits = detector(sound), fresh(sound)
        right = ((logits[:, -1] > 0) == (is_voice == 1)).float().mean()
        print(f"{exported}: outputs equal {torch.equal(logits, expected)}, {right:.0%} of 32 sounds right")
    return detector


if __name__ == "__main__":
    main()
