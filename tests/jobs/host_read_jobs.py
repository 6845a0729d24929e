"""A training run that counts all places in nnx that would make the host wait for a card."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx

STEPS, SKIPPED = 8, 4
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
_BELOW = (
    "/torch/_",
    "/torch/nn/",
    "/torch/autograd/",
    "/torch/amp/",
    "/torch/distributed/",
    "/torch/utils/",
    "/host_read_jobs.py",
    "<frozen",
    "/unittest/",
    "contextlib.py",
)


def _place() -> str:
    """Return the file and function of nnx that called torch; empty if the caller is not nnx."""
    frame = sys._getframe(2)
    while any(part in frame.f_code.co_filename for part in _BELOW):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    packages = [part for part in file.parts if part.startswith("nnx_")]
    return f"{packages[-1]}/{file.stem}.{frame.f_code.co_name}" if packages else ""


@contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Count reads of tensors by the host, and tensors made from lists or numbers on a device.

    On the CPU no read waits, and reads of tensors that are always in host memory count as well: the
    figures are an upper bound of the waits for a card.
    """

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (name != "tensor" or kwargs.get("device") is not None) and (place := _place()):
                found[f"{place}: {name}"] += 1
            return original(*args, **kwargs)

        return call

    with (
        mock.patch.multiple(Tensor, **{name: counting(name, getattr(Tensor, name)) for name in _READS}),
        mock.patch.object(torch, "tensor", counting("tensor", torch.tensor)),
    ):
        yield


class Model(pl.LightningModule):
    """A few blocks, one parameter that no step uses, and a clipped step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """For engines that trace the forward."""
        return {"x": batch[0]}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self(batch[0]).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(8 * STEPS, 8)), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Window(pl.Callback):
    """Counts between two steps of a run."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._counted: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == SKIPPED:
            self._counted = counted(self.found)
            self._counted.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == STEPS - 1 and self._counted is not None:
            self._counted.__exit__(None, None, None)


def count(strategy: str, scaled: bool) -> dict[str, float]:
    """The places that made the host wait, and how often in a step.

    Args:
        strategy: The name of it.
        scaled: Train in float16 with a scaled loss.
    """
    torch.manual_seed(0)
    window = Window()
    trainer = pl.Trainer(
        strategy=nnx.strategy(strategy),
        accelerator="cpu",
        devices=2,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")) if scaled else None,
        max_steps=STEPS,
        gradient_clip_val=0.5,
        callbacks=[window],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    return {place: number / (STEPS - SKIPPED) for place, number in sorted(window.found.items())}
