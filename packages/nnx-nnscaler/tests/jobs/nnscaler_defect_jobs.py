"""Jobs that show the presence or absence of a defect of Microsoft's integration.

Each runs as the ranks of one training and returns plain data. The model is small on purpose, and its loss
after a step identifies a set of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from jobs.nnscaler_models import make_strategy

Strategy = tuple[str, Mapping[str, Any]]
GLOBAL_BATCH = 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """One rank's consecutive share of every global batch; the last one may be short."""

    def __init__(self, samples: int, *, rank: int = 0, num_replicas: int = 1) -> None:
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(3))
        y = x.sin().roll(1, dims=1)
        self.shares = []
        for start in range(0, samples, GLOBAL_BATCH):
            length = min(GLOBAL_BATCH, samples - start) // num_replicas
            rows = slice(start + rank * length, start + (rank + 1) * length)
            self.shares.append((x[rows], y[rows]))

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.shares[index]


class Small(LightningModule):
    """Two layers of 8 x 16, with a seed of its own and a factor in the forward."""

    def __init__(self, *, seed: int = 1, samples: int = 32, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.samples, self.optimizer_name = samples, optimizer
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(mean_over_ranks(loss))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.validated.append(mean_over_ranks(self._loss(batch)))

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self(batch[0])

    def train_dataloader(self) -> Any:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {})
        return DataLoader(Rows(self.samples, **kwargs), batch_size=None)

    val_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        groups = [{"params": self.first.parameters()}, {"params": self.second.parameters(), "lr": 0.003}]
        return torch.optim.AdamW(groups, lr=0.01)


class Louder(Small):
    """The same layers in another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Moody(Small):
    """An evaluation that computes something else, chosen by a statement."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training:
            return x
        return x * 100


class Reaching(Small):
    """Uses a layer by itself outside the forward."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self._loss(batch) + 0.1 * self.first(batch[0]).square().mean()
        loss = loss + 0.01 * self.second.weight.square().sum()
        self.losses.append(mean_over_ranks(loss))
        return loss


class Branching(Small):
    """A module that cannot be traced, because its computation depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > -1e9 else x


SMALL: dict[str, Callable[..., Small]] = {
    each.__name__: each for each in (Small, Louder, Moody, Reaching, Branching)
}


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def make_trainer(strategy: Strategy, devices: int, **more: Any) -> Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    limits = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 2, "limit_predict_batches": 2}
    return Trainer(
        strategy=make_strategy(*strategy),
        accelerator="cpu",
        devices=devices,
        use_distributed_sampler=False,
        **{**dict.fromkeys(quiet, False), **limits, **more},
    )


def fit_and_evaluate(strategy: Strategy, devices: int) -> dict[str, list[float]]:
    """Fit, validate again with the same Trainer, and fit further with another: defects 1 and 2."""
    module = Small()
    trainer = make_trainer(strategy, devices)
    trainer.fit(module)
    at_the_end = list(module.validated)
    module.validated.clear()
    trainer.validate(module, verbose=False)
    make_trainer(strategy, devices).fit(module)
    return {"end": at_the_end, "after": module.validated[:2], "losses": module.losses}


def losses_of(strategy: Strategy, devices: int, model: str = "Small", **settings: Any) -> dict[str, Any]:
    """Train one of the models, and return the results."""
    trained = {key: settings.pop(key) for key in ("seed", "samples", "optimizer") if key in settings}
    resume = settings.pop("resume", None)
    save = settings.pop("save", None)
    weights_only = settings.pop("save_weights_only", False)
    if not strategy[0].startswith("nnscaler"):
        import nnx

        settings["plugins"] = [nnx.CheckpointIO()]
    module = SMALL[model](**trained)
    trainer = make_trainer(strategy, devices, **settings)
    trainer.fit(module, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save, weights_only=weights_only)
    return {
        "losses": module.losses,
        "validated": module.validated,
        "names": [name for name, _ in module.named_parameters()],
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
    }


class Inf(Callback):
    """Puts an infinity in one rank's gradients at one step, and notes the scale after each."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.scales = rank, step, []

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_rank == self.rank and len(self.scales) == self.step:
            from nnx_core.view.guard import local_mode

            parameter = next(module.parameters())
            with local_mode():  # as its own arithmetic would: a look at the whole is for all ranks together
                parameter.grad.view(-1)[0] = float("inf")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def overflow_on_one_rank(strategy: Strategy, devices: int) -> tuple[list[float], list[float]]:
    """Scales after every step, and how often each parameter was stepped: defect 4."""
    from nnx_nnscaler import NnScalerPrecision

    noted = Inf(rank=1, step=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = NnScalerPrecision("32-true", scaler)
    trainer = make_trainer(strategy, devices, callbacks=[noted], plugins=[plugin])
    trainer.fit(Small())
    (optimizer,) = trainer.optimizers
    return noted.scales, [float(state["step"]) for state in optimizer.state.values()]


def evaluate_only(strategy: Strategy, devices: int) -> dict[str, Any]:
    """Validate and predict with a model that never trained: defect 15."""
    module = Small()
    module.dummy_forward_args_fn = lambda batch: {"x": batch[0]}
    module.train_dataloader = None
    trainer = make_trainer(strategy, devices)
    trainer.validate(module, verbose=False)
    predicted = trainer.predict(module)
    return {"validated": module.validated, "shapes": [tuple(each.shape) for each in predicted]}


def files_of(directory: str) -> dict[str, bytes]:
    """Everything that a strategy left in a directory."""
    top = Path(directory)
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
