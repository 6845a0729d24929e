"""The classifier of lightning-ColossalAI's tests, trained by the strategies and by a plain loop.

`train` runs as the ranks of one training; `train_by_hand` is the numerical reference: float32 masters, 16-bit
working copies in mixed precision, gradients of every rank summed in float32. It runs in one process, and
computes each rank's share of a batch in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES, FEATURES = 3, 32
GLOBAL_BATCH = 24
TRAINED = 20
"""Global batches of an epoch; as many again are for validation and for the test."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003),
}


@dataclass(frozen=True)
class Training:
    """One training, as data that travels to the workers."""

    strategy: str = "colossalai"
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 2
    precision: str = "32-true"
    optimizer: str = "Adam"
    built: str = "eagerly"
    clip: float | None = None
    clip_algorithm: str | None = None
    epochs: int = 1
    initial_scale: float = 32.0


# --- data and model -------------------------------------------------------------------------------


class Blobs(Dataset[tuple[Tensor, Tensor]]):
    """Points around one centre for each class; an item is a rank's share of a global batch."""

    def __init__(self, seed: int, *, num_replicas: int = 1, rank: int = 0) -> None:
        generator = torch.Generator().manual_seed(5)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        generator.manual_seed(seed)
        self.y = torch.randint(CLASSES, (TRAINED, GLOBAL_BATCH), generator=generator)
        noise = torch.randn(TRAINED, GLOBAL_BATCH, FEATURES, generator=generator)
        self.x = centres[self.y] + 1.5 * noise
        share = GLOBAL_BATCH // num_replicas
        self.rows = slice(rank * share, (rank + 1) * share)

    def __len__(self) -> int:
        return TRAINED

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index, self.rows], self.y[index, self.rows]


def layers() -> nn.Sequential:
    """Return the initial layers of every training."""
    torch.manual_seed(11)
    hidden = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*hidden, nn.Linear(FEATURES, CLASSES))


class Classifier(LightningModule):
    """Logs loss and accuracy of every stage over all ranks."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_plan = training
        self.losses: list[float] = []
        self.backwards = 0
        self.checked_before_training = False
        self.model = layers() if training.built == "eagerly" else None

    def forward(self, x: Tensor) -> Tensor:
        assert self.model is not None
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self._log("train", batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.checked_before_training |= self.trainer.sanity_checking
        self._log("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self._log("test", batch)

    def _log(self, stage: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self(batch[0]).float()
        loss = F.cross_entropy(logits, batch[1])
        right = (logits.argmax(dim=1) == batch[1]).float().mean()
        self.log_dict(
            {f"{stage}_loss": loss, f"{stage}_acc": right}, on_step=False, on_epoch=True, sync_dist=True
        )
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.training_plan.optimizer)(self.parameters())

    def train_dataloader(self) -> Any:
        return self._loader(1)

    def val_dataloader(self) -> Any:
        return self._loader(2)

    def test_dataloader(self) -> Any:
        return self._loader(3)

    def _loader(self, seed: int) -> Any:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {})
        return DataLoader(Blobs(seed, **kwargs), batch_size=None)


class BuiltLater(Classifier):
    """Builds its layers when the strategy is set up, as Lightning 2 asks for."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = layers()


class BuiltSharded(Classifier):
    """Builds its layers in the hook that ColossalAI's strategy insisted on."""

    def configure_sharded_model(self) -> None:
        if self.model is None:
            self.model = layers()


CLASSIFIERS = {
    "eagerly": Classifier,
    "configure_model": BuiltLater,
    "configure_sharded_model": BuiltSharded,
}


def _optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    import nnx_colossalai

    return partial(getattr(nnx_colossalai, name), lr=0.01)


# --- trained by a strategy ------------------------------------------------------------------------


def make_trainer(training: Training, **more: Any) -> Trainer:
    """A quiet Trainer on the CPU."""
    import nnx

    options = {"min_num_params": 100, **training.options}  # a chunk for each layer
    precision: dict[str, Any] = {"precision": training.precision}
    if training.precision == "16-mixed":  # which Trainer turns into bf16-mixed on the CPU
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
        options["initial_scale"] = training.initial_scale
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    return Trainer(
        strategy=nnx.strategy(training.strategy, **options),
        accelerator="cpu",
        devices=training.devices,
        max_epochs=training.epochs,
        gradient_clip_val=training.clip,
        gradient_clip_algorithm=training.clip_algorithm,
        **{**dict.fromkeys(quiet, False), "enable_checkpointing": False, **precision, **more},
    )


def train(training: Training) -> dict[str, Any]:
    """Fit, with sanity check and validation; return the outcome on each rank."""
    module = CLASSIFIERS[training.built](training)
    trainer = make_trainer(training)
    trainer.fit(module)
    return {
        "losses": module.losses,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "backwards": module.backwards,
        "checked_before_training": module.checked_before_training,
    }


def fit_and_test(training: Training) -> dict[str, float]:
    """Metrics of all three stages, on this rank."""
    module = CLASSIFIERS[training.built](training)
    trainer = make_trainer(training)
    trainer.fit(module)
    metrics = dict(trainer.callback_metrics)
    metrics.update(trainer.test(module, verbose=False)[0])
    return {key: float(value) for key, value in metrics.items()}


def evaluate_only(training: Training) -> dict[str, float]:
    """Test a model that never trained."""
    module = CLASSIFIERS[training.built](training)
    (metrics,) = make_trainer(training).test(module, verbose=False)
    return metrics


def around_a_checkpoint(training: Training, folder: str) -> dict[str, Any]:
    """Test after fitting, and a new model under a new Trainer from the best checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = CLASSIFIERS[training.built](training)
    best = ModelCheckpoint(dirpath=folder, monitor="val_acc", mode="max", save_top_k=1)
    trainer = make_trainer(training, enable_checkpointing=True, callbacks=[best])
    trainer.fit(module)
    (before,) = trainer.test(module, ckpt_path="best", verbose=False)
    (after,) = evaluate_checkpoint(training, best.best_model_path)
    return {"before": before, "after": after, "path": best.best_model_path}


def evaluate_checkpoint(training: Training, path: str) -> list[Mapping[str, float]]:
    """Test a new model with the weights of a checkpoint."""
    return make_trainer(training).test(CLASSIFIERS[training.built](training), ckpt_path=path, verbose=False)


# --- trained by hand ------------------------------------------------------------------------------


def train_by_hand(training: Training) -> dict[str, Any]:
    """The reference: no strategy, no Trainer, no chunks."""
    masters = layers()
    working = _working_copy(masters, training.precision)
    optimizer = _plain_optimizer(training.optimizer)(masters.parameters())
    scale = training.initial_scale if training.precision == "16-mixed" else 1.0
    losses = []
    for _ in range(training.epochs):
        for shares in _batches(training.devices):
            found = [_gradients(working, share, training.precision, scale) for share in shares]
            losses.append(sum(loss for loss, _ in found) / len(found))
            for index, master in enumerate(masters.parameters()):
                master.grad = sum(gradients[index] for _, gradients in found) / len(found) / scale
            _clip(masters, training)
            optimizer.step()
            with torch.no_grad():
                for copied, master in zip(working.parameters(), masters.parameters(), strict=True):
                    copied.copy_(master)
    named = {f"model.{name}": value.detach().clone() for name, value in masters.state_dict().items()}
    return {"losses": losses, "weights": named, "metrics": _evaluate(working, training)}


def _working_copy(masters: nn.Module, precision: str) -> nn.Module:
    dtypes = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
    return copy.deepcopy(masters).to(dtypes.get(precision, torch.float32))


def _plain_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return torch's optimizer of that name, with zero weight decay as ColossalAI's has by default."""
    if name == "RMSprop":  # of which torch has no fused kernel
        return OPTIMIZERS[name]
    own = OPTIMIZERS.get(name, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0))
    return partial(own, fused=True)


def _batches(ranks: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    parts = [Blobs(1, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for index in range(TRAINED):
        yield [part[index] for part in parts]


def _gradients(
    working: nn.Module, share: tuple[Tensor, Tensor], precision: str, scale: float
) -> tuple[float, list[Tensor]]:
    with _autocast(precision):
        loss = F.cross_entropy(working(share[0]).float(), share[1])
    gradients = torch.autograd.grad(loss * scale, list(working.parameters()))
    return loss.item(), [gradient.float() for gradient in gradients]


def _autocast(precision: str) -> Any:
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    return torch.autocast("cpu", dtype=dtype, enabled=precision.endswith("mixed"))


def _clip(masters: nn.Module, training: Training) -> None:
    if training.clip is None:
        return
    if training.clip_algorithm == "value":
        nn.utils.clip_grad_value_(masters.parameters(), training.clip)
    else:
        nn.utils.clip_grad_norm_(masters.parameters(), training.clip)


@torch.no_grad()
def _evaluate(working: nn.Module, training: Training) -> dict[str, float]:
    metrics = {}
    for stage, seed in (("val", 2), ("test", 3)):
        data = Blobs(seed)
        with _autocast(training.precision):
            logits = working(data.x.flatten(0, 1)).float()
        metrics[f"{stage}_loss"] = float(F.cross_entropy(logits, data.y.flatten()))
        metrics[f"{stage}_acc"] = float((logits.argmax(dim=1) == data.y.flatten()).float().mean())
    return metrics


def untrained_by_hand(training: Training) -> dict[str, float]:
    """Metrics of the model that every training starts from."""
    return _evaluate(_working_copy(layers(), training.precision), training)
