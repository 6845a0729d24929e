"""`ColossalAIPrecision` trains in 16 bits on the CPU too, and checkpoints store its loss scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

import nnx
from nnx_colossalai.loss_scale import ColossalAIPrecision, DynamicLossScaler
from nnx_core.errors import OptionError

RULE = {"initial_scale": 2.0**6, "growth_interval": 3, "hysteresis": 2, "min_scale": 2.0, "max_scale": 2.0**9}
OVERFLOWS = (1, 2, 5, 6, 11)
"""Steps that overflow."""


class Net(LightningModule):
    """Notes the loss scale after every step, and the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.scales: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out = self.layers(batch)
        self.dtypes.add(out.dtype)
        loss = out.float().square().mean()
        return loss * float("inf") if self.trainer.fit_loop.total_batch_idx in OVERFLOWS else loss

    def on_train_batch_end(self, *_: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(scaler.get_scale())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        batches = torch.randn(20, 2, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def fit(steps: int, *, resume: Path | None = None, keep: Path | None = None, **options: Any) -> Net:
    net = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=nnx.strategy("colossalai", **{**RULE, **options}),
        plugins=[ColossalAIPrecision("16-mixed")],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, ckpt_path=resume)
    if keep is not None:
        trainer.save_checkpoint(keep)
    assert isinstance(trainer.precision_plugin.scaler, DynamicLossScaler)  # type: ignore[attr-defined]
    return net


def expected(steps: int) -> list[float]:
    """The rule once more, by hand."""
    scale, clean, overflows, trace = RULE["initial_scale"], 0, 0, []
    for step in range(steps):
        if step in OVERFLOWS:
            clean, overflows = 0, overflows + 1
            scale = max(scale / 2, RULE["min_scale"]) if overflows >= RULE["hysteresis"] else scale
        elif clean + 1 == RULE["growth_interval"]:
            scale, clean, overflows = min(scale * 2, RULE["max_scale"]), 0, 0
        else:
            clean += 1
        trace.append(scale)
    return trace


@pytest.mark.parametrize("overlap", ["none", "exact"])
def test_it_computes_in_float16_with_the_scale_of_the_strategy(overlap: str) -> None:
    net = fit(14, overlap=overlap)
    assert net.dtypes == {torch.float16}
    assert net.scales == expected(14)
    assert len(set(net.scales)) > 3
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())


@pytest.mark.parametrize("at", [2, 6, 7])
def test_a_resumed_run_goes_on_with_the_same_scale_and_weights(at: int, tmp_path: Path) -> None:
    whole = fit(14)
    fit(at, keep=tmp_path / "half.ckpt")
    rest = fit(14, resume=tmp_path / "half.ckpt", initial_scale=2.0**3)
    assert rest.scales == whole.scales[at:]
    for mine, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_it_is_a_plugin_of_the_trainer_and_knows_its_old_argument() -> None:
    plugin: Any = ColossalAIPrecision(16)
    assert isinstance(plugin, MixedPrecision)
    assert (plugin.precision, type(plugin.scaler)) == ("16-mixed", torch.amp.GradScaler)
    assert ColossalAIPrecision("bf16-mixed").scaler is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["32-true", "16-true", "fp8"])
def test_other_precisions_are_the_trainers(precision: str) -> None:
    with pytest.raises(OptionError, match=f"precision='{precision}' is not allowed"):
        ColossalAIPrecision(precision)
