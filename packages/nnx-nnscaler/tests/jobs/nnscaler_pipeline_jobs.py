"""Jobs that train small models in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nnx
from jobs.nnscaler_models import Case, losses_of
from nnx_core.errors import PlanError
from nnx_core.parts_backend import stepping
from nnx_core.view.guard import local_mode
from nnx_nnscaler.pipeline.turns import Turns
from nnx_nnscaler.plan.pipeline_plan import pipeline_plan_from_text
from nnx_test_helpers.live_bytes import LiveBytes

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Deep(LightningModule):
    """Equal layers, and a forward that returns its loss beside its results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
        self.losses: list[float] = []
        self.plan = ""

    def on_train_start(self) -> None:
        describe = getattr(getattr(self.trainer.strategy, "backend", None), "summary", None)
        self.plan = describe(self) if describe else ""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return F.mse_loss(y, x.sin()), y

    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, _ = self(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LossInStep(Deep):
    """The loss is computed in the step, which logs it and other values of all kinds."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Tensor, index: int) -> Any:
        y = self(batch)
        loss = F.mse_loss(y, batch.sin()) * self.scale
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        near = (y - batch.sin()).abs() < 0.5
        self.log_dict(
            {"near": near.float().mean(), "share": near.sum() / near.numel()}, batch_size=batch.shape[0]
        )
        self.log("first", near.float().mean(0)[0], reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("samples", torch.tensor(1.0) * batch.shape[0], reduce_fx="sum")
        return {"loss": loss, "scores": y.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        seen = [value.item() for _, value in sorted(self.trainer.callback_metrics.items())]
        self.losses += [outputs["loss"].item(), outputs["scores"].square().sum().item(), *seen]

    def on_train_epoch_end(self) -> None:
        self.losses += [value.item() for _, value in sorted(self.trainer.callback_metrics.items())]
        self.scale = 0.5  # which makes another program


class _Step:
    """Steps that a program could not repeat."""

    @staticmethod
    def asks_the_trainer(module: Any, batch: Tensor, index: int) -> Any:
        return F.mse_loss(module(batch), batch.sin()) * (1 + module.current_epoch)

    @staticmethod
    def counts(module: Any, batch: Tensor, index: int) -> Any:
        loss = F.mse_loss(module(batch), batch.sin())
        module.count = getattr(module, "count", 1) + 1
        return loss * module.count

    @staticmethod
    def looks_at_the_index(module: Any, batch: Tensor, index: int) -> Any:
        return F.mse_loss(module(batch), batch.sin()) * (2 if index % 2 else 1)

    @staticmethod
    def mixes_samples(module: Any, batch: Tensor, index: int) -> Any:
        y = module(batch)
        return F.cross_entropy(y @ y.T, torch.arange(len(y)))

    @staticmethod
    def draws(module: Any, batch: Tensor, index: int) -> Any:
        torch.manual_seed(module.trainer.global_step)
        return F.mse_loss(module(batch + torch.randn_like(batch)), batch.sin())


STEPS = [name for name in vars(_Step) if not name.startswith("_")]


class LossInOddStep(LossInStep):
    """Its step is one of those."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.step = getattr(_Step, name)

    def training_step(self, batch: Tensor, index: int) -> Any:
        return {"loss": self.step(self, batch, index)}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_epoch_end(self) -> None:
        pass


class WithAuxiliaryLoss(Deep):
    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, y = self(batch)
        return loss + y.square().mean()


class BackwardTwice(Deep):
    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, _ = self(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class Branches(Deep):
    """Two results, of which each depends on parameters that the other does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.layers[:4](x)
        return self.side(half.argmax(-1, keepdim=True) + x), self.layers[4:](half)

    def training_step(self, batch: Tensor, index: int) -> Any:
        side, main = self(batch)
        loss = side.square().mean() if index % 2 else (main - batch).square().mean()
        self.losses.append(loss.item())
        return loss


class LossBesideResult(Branches):
    """The forward returns the loss of the one, and the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side, main = super().forward(x)
        return (main - x).square().mean(), side

    training_step = Deep.training_step


class Penalized(Deep):
    """A loss over masked values, and a penalty of weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = self.layers(x), (x[:, 0] > 0).to(x.dtype)
        loss = ((y - x).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)
        first, last = self.layers[0][0].weight, self.layers[-1][0].weight
        return loss + 0.01 * (first.square().sum() + last.abs().sum()), y


class Contrast(Deep):
    """Compares each sample with all others, whose number is written into the graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.normalize(self.layers(x), dim=-1)
        return F.cross_entropy(y @ y.t(), torch.arange(len(y))), y


class EarlyState(Deep):
    """Its optimizer makes its state when it is built."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2, initial_accumulator_value=0.1)


OF_ONE_PROCESS = (Branches, LossBesideResult, Penalized, Contrast, EarlyState)


def weights_after(schedule: str, folder: str) -> dict[str, list[Tensor]]:
    """By model, its weights after some steps that decay them."""
    found = {}
    for kind in OF_ONE_PROCESS:
        module = kind()
        options = {"pipeline_scheduler": schedule} if schedule else {}
        train(module, rows(16), batch=8, folder=f"{folder}/{kind.__name__}", **options)
        found[kind.__name__] = [value.clone() for value in module.state_dict().values()]
    return found


def train(
    module: LightningModule,
    data: Any,
    *,
    batch: int,
    folder: str,
    accumulate: int = 1,
    plugins: Any = None,
    **options: Any,
) -> None:
    devices = 2 if options else 1
    strategy = nnx.strategy("nnscaler_pp", gen_savedir=folder, **options) if options else "auto"
    more = {"accumulate_grad_batches": accumulate, "plugins": plugins}
    trainer = Trainer(strategy=strategy, devices=devices, **more, **_QUIET)
    trainer.fit(module, DataLoader(data, batch_size=batch))


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(2))


@contextmanager
def counting_turns() -> Iterator[list[str]]:
    """Yields a list that has an item for each forward and backward that this process has run in turns."""
    found: list[str] = []
    original = Turns.run

    def run(self: Any, own: Any) -> None:
        found.append(self._loss)
        original(self, own)

    Turns.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Turns.run = original  # type: ignore[method-assign]


def losses_in_turns(case: Case) -> tuple[list[float], list[float], int]:
    """Return the result of `losses_of`, and the number of steps that interleaved forward and backward."""
    with counting_turns() as turns:
        return *losses_of(case), len(turns)


def logged(options: dict[str, Any], folder: str) -> tuple[list[float], int]:
    """Every loss and logged value of a training with gradients of two batches each, and turns."""
    module = LossInStep()
    with counting_turns() as turns:
        train(module, rows(30), batch=8, folder=folder, accumulate=2, **options)
    return module.losses, len(turns)


def _options(schedule: str) -> dict[str, Any]:
    return {"pipeline_scheduler": schedule} if schedule else {}


def scaled(schedule: str, folder: str) -> tuple[list[float], float, int]:
    """Losses of a training whose gradients overflow float16 at first, the last scale, and turns."""
    module = LossInStep()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    with counting_turns() as turns:
        train(module, rows(64), batch=8, folder=folder, plugins=[plugin], **_options(schedule))
    assert plugin.scaler is not None
    return module.losses[::6], plugin.scaler.get_scale(), len(turns)


def odd_steps(schedule: str, folder: str) -> tuple[dict[str, list[float]], int]:
    """The losses of modules whose steps cannot be traced, and turns."""
    found = {}
    with counting_turns() as turns:
        for name in STEPS:
            module = LossInOddStep(name)
            train(module, rows(16), batch=8, folder=folder, **_options(schedule))
            found[name] = module.losses
    return found, len(turns)


def loop_of_ones_own(schedule: str, folder: str) -> tuple[list[float], int]:
    """Losses of a loop of Fabric's over a forward that returns no loss, and over one that does; and turns."""
    options = {"namespace": "lightning.fabric", "gen_savedir": folder, **_options(schedule)}
    strategy = nnx.strategy("nnscaler_pp", **options) if schedule else "auto"
    fabric = Fabric(accelerator="cpu", devices=2 if schedule else 1, strategy=strategy)
    fabric.launch()
    losses = []
    with counting_turns() as turns:
        for cls in (LossInStep, Deep):
            module = cls()
            module.example_input_array = rows(8)
            model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
            for batch in rows(32).split(8):
                result = model(batch)
                loss = F.mse_loss(result, batch.sin()) if cls is LossInStep else result[0]
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses, len(turns)


def held_microbatches(folder: str, schedule: str, microbatches: int, in_step: bool) -> int:
    """Return the maximum number of microbatches whose activations this rank held at the same time."""
    most = 0
    original = Turns._forward

    def counting(self: Any, number: int, index: int) -> None:
        nonlocal most
        original(self, number, index)
        most = max(most, len(self._given))

    Turns._forward = counting  # type: ignore[method-assign]
    try:
        train(
            *(LossInStep() if in_step else Deep(), rows(16)),
            batch=16,
            folder=folder,
            pipeline_scheduler=schedule,
            pipeline_nmicros=microbatches,
        )
    finally:
        Turns._forward = original  # type: ignore[method-assign]
    assert most, "it did not work in turns"
    return most


class Bytes(Callback):
    """Counts the bytes of a rank's parameters, gradients and optimizer state, except step counters."""

    found = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        backend, (optimizer,) = trainer.strategy.backend, trainer.optimizers  # type: ignore[attr-defined]
        with local_mode(), stepping(backend._states.of(optimizer)):
            parameters = list(module.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [
                v for values in optimizer.state.values() for v in values.values() if v.ndim or v.numel() > 1
            ]
            masters = list(backend._masters.copies.values())
            self.found = sum(
                t.numel() * t.element_size() for t in (*parameters, *gradients, *states, *masters)
            )


def stored_and_predicted(
    folder: str, strategy: str, devices: int, precision: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer state on this rank: counted, and as the plan has it."""
    counted = Bytes()
    trainer = Trainer(
        strategy=nnx.strategy(strategy, gen_savedir=folder, **options),
        devices=devices,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[counted],
        **_QUIET,
    )
    module = Deep()
    module.layers.append(module.layers[0])  # stages share it
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    trainer.fit(module, DataLoader(rows(16).to(dtype), batch_size=16))  # type: ignore[arg-type]
    plan = pipeline_plan_from_text(next(Path(folder).rglob("plan.json")).read_text())
    place = trainer.global_rank % plan.size // plan.stages[0].size
    return counted.found, plan.usage[place].states


def planned_losses_with(
    folder: str, strategy: str, options: dict[str, Any], width: int = 8
) -> tuple[list[float], str, str]:
    """Return losses, the plan in the first log line of the run, and the error that came instead."""
    module = Deep()
    if width != 8:
        module.layers[0] = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
    trainer = Trainer(strategy=nnx.strategy(strategy, gen_savedir=folder, **options), devices=2, **_QUIET)
    try:
        trainer.fit(module, DataLoader(rows(256), batch_size=256))  # type: ignore[arg-type]
    except PlanError as error:
        return [], "", str(error)
    return module.losses, module.plan, ""


def unequal_batches(schedule: str, folder: str) -> list[float]:
    """Losses where the last batch has 5 samples instead of 8, which are cut into fewer microbatches."""
    module = Deep()
    train(module, rows(29), batch=8, folder=folder, **({"pipeline_scheduler": schedule} if schedule else {}))
    return module.losses


def measured(folder: str, file: str, schedule: str, steps: int) -> list[float]:
    """Losses of a run that is measured, four microbatches a step."""
    module = Deep()
    train(
        *(module, rows(4 * steps)),
        batch=8,
        folder=folder,
        pipeline_scheduler=schedule,
        pipeline_nmicros=4,
        timeline_file=file,
    )
    return module.losses


def auxiliary_loss(folder: str) -> tuple[str, str]:
    return _error(WithAuxiliaryLoss(), folder)


def second_backward(folder: str) -> tuple[str, str]:
    return _error(BackwardTwice(), folder)


def _error(module: LightningModule, folder: str) -> tuple[str, str]:
    try:
        train(module, rows(16), batch=8, folder=folder, pipeline_scheduler="1f1b")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Wide(LightningModule):
    """Blocks with more activations within than between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(4)]
        self.layers = nn.Sequential(*layers)
        self.losses: list[float] = []
        self.most = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        penalty = self.layers[-1][2].bias.square().mean()
        return F.mse_loss(y, x.sin()) + 0.1 * penalty, (y > 0).sum()

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self(batch)[0]

    def validation_step(self, batch: Tensor, index: int) -> None:
        with LiveBytes() as live:
            loss, positive = self(batch)
        self.losses += [loss.item(), float(positive)]
        if index:  # the first call plans
            self.most = max(self.most, live.most)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def evaluated(schedule: str, folder: str) -> tuple[list[float], int, int, int]:
    """Validation losses; bytes of activations, counted and planned; the microbatches of the plan."""
    module = Wide()
    options = {"gen_savedir": folder, **_options(schedule)}
    strategy = nnx.strategy("nnscaler_pp", **options) if schedule else "auto"
    trainer = Trainer(strategy=strategy, devices=2 if schedule else 1, **{**_QUIET, "max_epochs": 1})
    data = DataLoader(torch.randn(128, 32, generator=torch.Generator().manual_seed(2)), batch_size=64)  # type: ignore[arg-type, var-annotated]
    trainer.fit(module, data, data)
    plans = [pipeline_plan_from_text(file.read_text()) for file in Path(folder).rglob("plan.json")]
    if not plans:
        return module.losses, module.most, 0, 1
    plan = min(plans, key=lambda plan: sum(usage.states for usage in plan.usage))  # no gradients there
    usage = plan.usage[trainer.global_rank]
    return module.losses, module.most, usage.peak - usage.states, plan.microbatches
