"""Jobs that train under Lightning's averaging callbacks and report both sets of weights."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

import nnx
from jobs import engines
from jobs.training import MODELS, Net, Run, SaveAt, make_trainer


def make_callback(kind: str) -> Any:
    """An averaging callback by name."""
    if kind == "ema":
        return EMAWeightAveraging(decay=0.6)
    if kind == "mean":
        return WeightAveraging()
    if kind == "lists":
        return WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6))
    if kind == "no_buffers":
        return WeightAveraging(use_buffers=False)
    if kind == "epochs":
        return EMAWeightAveraging(decay=0.6, update_every_n_steps=0, update_starting_at_epoch=0)
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)


class Look(Callback):
    """Notes during training how much of the average this rank holds."""

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging
        self.elements = 0
        self.of_the_model = 0
        self.same_kinds = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        average = average_module(self.averaging)
        self.elements = sum(local(p).numel() for p in average.parameters())
        self.of_the_model = sum(local(p).numel() for p in module.parameters())
        self.same_kinds = [type(p) for p in average.parameters()] == [type(p) for p in module.parameters()]


def average_module(callback: Any) -> nn.Module:
    average = callback._average_model
    return getattr(average, "module", average)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fit(run: Run, kind: str, epochs: int | None = None) -> dict[str, Any]:
    """Train, in epochs of two batches if so many are asked for; both sets of weights, and what was seen."""
    extra: dict[str, Any] = {"max_epochs": epochs, "limit_train_batches": 2} if epochs else {}
    engines.register()
    callback = make_callback(kind)
    look = Look(callback)
    module = MODELS[run.model](run)
    if run.strategy.startswith("ddp"):
        extra["plugins"] = [nnx.CheckpointIO()]
    trainer = make_trainer(run, callbacks=[callback, look, SaveAt(run)], **extra)
    trainer.fit(module, ckpt_path=run.resume)
    return report(trainer, module, callback, look)


def report(trainer: Trainer, module: Net, callback: Any, look: Look) -> dict[str, Any]:
    average = average_module(callback)
    everything = (*average.parameters(), *average.buffers(), *module.parameters())
    return {
        "losses": module.losses,
        "weights": state(module),
        "average": state(average),
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0.0)),
        "plain": all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in everything),
        "routed": sorted(set(vars(callback)) & set(dir(type(callback)))),
        "share": look.elements / max(1, sum(p.numel() for p in module.parameters())),
        "same_kinds": look.same_kinds and look.elements == look.of_the_model,
    }


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
