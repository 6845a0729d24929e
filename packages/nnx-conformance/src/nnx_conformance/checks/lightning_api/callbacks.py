"""Callbacks of users and of Lightning, including those that freeze and unfreeze during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary.model_summary import summarize
from torch import Tensor, nn

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import FEATURES, WIDTH, Block, Outcome, Plain, Task, process_rank_and_size
from nnx_conformance.training import complete, fit, make_trainer

# Callbacks that look up parameters by name.


_TOLERANCE = TOLERANCE["float32"]


@check()
def ema_by_name(bench: Bench) -> None:
    """A callback's moving average by name, swapped in for validation, equals that of one process."""
    alone = bench.alone(_averaged)
    ranks = bench.run(_averaged)
    expect_same_run(ranks, alone, tolerance=_TOLERANCE, what="averaged weights")
    for rank, outcome in enumerate(ranks):
        seen, expected = outcome.metrics["val_loss"], alone.metrics["val_loss"]
        expect(
            abs(seen - expected) <= _TOLERANCE,
            f"rank {rank}: validating the average gives val_loss {seen:.7g}, one process has {expected:.7g}.",
        )


@check("parameter_groups")
def weight_decay_by_name(bench: Bench) -> None:
    """Groups by parameter name and module class, without decay of norms and biases, train."""
    alone = bench.alone(_decayed)
    ranks = bench.run(_decayed)
    expect_same_run(ranks, alone, tolerance=_TOLERANCE, what="weight decay by name")
    for rank, outcome in enumerate(ranks):
        seen, expected = outcome.notes["groups"], alone.notes["groups"]
        expect(seen == expected, f"rank {rank}: the parameter groups are {seen}, expected {expected}.")


@check()
def gradient_norms_by_name(bench: Bench) -> None:
    """Norms of `parameter.grad`, by name, are those of one process right before the optimizer's step."""
    alone = bench.alone(_gradient_norms)
    ranks = bench.run(_gradient_norms)
    if any(seen is None for seen in ranks):
        bench.not_applicable("parameters are local shards, and so are their gradients")
    if not any(any(seen) for seen in ranks):
        bench.not_applicable("the engine does not keep gradients in `parameter.grad`")
    is_sharded = bench.identity.capabilities.shards_gradients
    for step, (expected, *norms) in enumerate(zip(alone, *ranks, strict=True)):
        for rank, found in enumerate(norms):
            # If unsharded parameters have sharded gradients, some rank has each gradient.
            own = {name: norm for name, norm in expected.items() if name in found or not is_sharded}
            _expect_close(found, own, where=f"rank {rank}, norms of gradients in step {step}")
        missing = expected.keys() - set().union(*norms)
        expect(not missing, f"step {step}: no rank has a gradient of {sorted(missing)}.")


@check("parameter_groups", of_adapter=True)
def learning_rate_monitor(bench: Bench) -> None:
    """LearningRateMonitor logs each group's rate under the same name as in one process."""
    alone = bench.alone(_learning_rates)
    # An engine may log metrics of its own.
    logged = [
        entry for entry in bench.run(_learning_rates)[0] if any(name.startswith("lr-") for name in entry)
    ]
    expect(
        logged == alone,
        f"rank 0 logs {logged}, one process logs {alone}.",
    )


@check(of_adapter=True)
def model_summary(bench: Bench) -> None:
    """A model summary in training counts all parameters by layer, and sees the outputs of layers."""
    alone = bench.alone(_summary)
    for rank, seen in enumerate(bench.run(_summary)):
        if seen["local"]:
            bench.not_applicable(
                "parameters are local shards, and a summary counts only this rank's elements"
            )
        for what, expected in alone.items():
            expect(seen[what] == expected, f"rank {rank}: {what} is {seen[what]}, expected {expected}.")


@check(of_adapter=True)
def early_stopping_on_one_rank(bench: Bench) -> None:
    """EarlyStopping stops all ranks after the same step, even if only one rank's metric asks for it."""
    for rank, steps in enumerate(bench.run(_stopped_early, world_size=2)):
        expect(
            steps == 4, f"rank {rank}: the run stopped after {steps} steps, expected 4 (two epochs of two)."
        )


def _expect_close(seen: dict[str, float], expected: dict[str, float], *, where: str) -> None:
    expect(list(seen) == list(expected), f"{where}: there are {list(seen)}, expected {list(expected)}.")
    for name, wanted in expected.items():
        # This form of comparison also fails for NaN.
        is_close = abs(seen[name] - wanted) <= _TOLERANCE
        expect(is_close, f"{where}: {name} is {seen[name]:.7g}, one process has {wanted:.7g}.")


# Workers run the functions below.


class _NamedAverage(Callback):
    """Keeps a moving average by name, like many projects do."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.3)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            own = parameter.detach().clone()
            parameter.copy_(self.shadow[name])
            self.shadow[name] = own


def _averaged(subject: Subject) -> Outcome:
    return fit(subject, Task(steps=4), callbacks=[_NamedAverage()], limit_val_batches=2, val_check_interval=2)


class _Decaying(Plain):
    """Decays only the weights of linear layers, by a rule from many projects."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed: list[str] = []
        others: list[str] = []
        for module_name, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}" if module_name else name
                is_weight = name.endswith("weight") and isinstance(module, nn.Linear)
                (decayed if is_weight else others).append(full_name)
        parameters = dict(self.named_parameters())
        return self.optimizer(
            [
                {"params": [parameters[n] for n in decayed], "weight_decay": 0.5, "name": "decayed"},
                {
                    "params": [parameters[n] for n in others],
                    "weight_decay": 0.0,
                    "lr": 0.01,
                    "name": "others",
                },
            ]
        )

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.groups = [
            {key: group[key] for key in ("name", "weight_decay", "lr")}
            for group in self.trainer.optimizers[0].param_groups
        ]


def _decayed(subject: Subject) -> Outcome:
    task = Task(model=_Decaying, optimizer="adamw")
    module = _Decaying(task)
    outcome = fit(subject, task, module=module)
    outcome.notes["groups"] = module.groups
    return outcome


class _GradientNorms(Callback):
    """Logs the norm of each gradient by name."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []
        self.local = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.shapes = {name: p.shape for name, p in pl_module.named_parameters()}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.local = any(p.shape != self.shapes[n] for n, p in pl_module.named_parameters())
        if not self.local:
            gradients = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
            norms = {name: complete(gradient.norm()).item() for name, gradient in gradients.items()}
            pl_module.log_dict(norms)
            self.norms.append(norms)


def _gradient_norms(subject: Subject) -> list[dict[str, float]] | None:
    """Return the norms by step; None if a rank only has local shards of the parameters."""
    callback = _GradientNorms()
    fit(subject, Task(), callbacks=[callback])
    return None if callback.local else callback.norms


class _Scheduled(_Decaying):
    """Has a scheduler, so that rates change."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Memory(Logger):
    """Keeps the logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""


def _learning_rates(subject: Subject) -> list[dict[str, float]]:
    memory = _Memory()
    fit(
        subject,
        Task(model=_Scheduled),
        callbacks=[LearningRateMonitor(log_weight_decay=True)],
        logger=memory,
        log_every_n_steps=1,
    )
    return memory.logged


class _Worsening(Plain):
    """Logs a metric that gets worse on rank 1 only."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        direction = 1.0 if process_rank_and_size()[0] == 1 else -1.0
        self.log("own", direction * self.current_epoch, sync_dist=False, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


def _stopped_early(subject: Subject) -> int:
    task = Task(model=_Worsening, steps=8, batches=2)
    callback = EarlyStopping("own", patience=1, check_on_train_epoch_end=True)
    trainer = make_trainer(subject, task, callbacks=[callback])
    trainer.fit(task.module())
    return trainer.global_step


class _Summarized(Plain):
    """Has an example input, so that the summary runs the layers."""

    def build(self) -> None:
        super().build()
        self.example_input_array = torch.zeros(2, 6)
        self.embed.requires_grad_(False)
        self.shapes = {name: p.shape for name, p in self.named_parameters()}
        self.facts: dict[str, Any] = {}

    def on_fit_start(self) -> None:
        summary = summarize(self)
        self.facts = {
            "total parameters": summary.total_parameters,
            "trainable parameters": summary.trainable_parameters,
            "layer names": summary.layer_names,
            "parameters by layer": summary.param_nums,
            "outputs by layer": summary.out_sizes,
            "local": any(p.shape != self.shapes[name] for name, p in self.named_parameters()),
        }


def _summary(subject: Subject) -> dict[str, Any]:
    task = Task(model=_Summarized, steps=1)
    module = _Summarized(task)
    fit(subject, task, module=module)
    return module.facts


# Lightning's callbacks that keep an averaged copy of the model.


@check()
def weight_averaging(bench: Bench) -> None:
    """WeightAveraging validates with, and leaves, the averaged weights of one process."""
    _compare(bench, "WeightAveraging")


@check()
def ema_weight_averaging(bench: Bench) -> None:
    """EMAWeightAveraging validates with, and leaves, the averaged weights of one process."""
    _compare(bench, "EMAWeightAveraging")


@check()
def stochastic_weight_averaging(bench: Bench) -> None:
    """StochasticWeightAveraging anneals rates and leaves the averaged weights of one process."""
    _compare(bench, "StochasticWeightAveraging")


def _compare(bench: Bench, which: str) -> None:
    alone = bench.alone(_averaged_by, which)
    ranks = bench.run(_averaged_by, which)
    expect_same_run(ranks, alone, tolerance=_TOLERANCE, what=which)
    for rank, outcome in enumerate(ranks):
        seen, expected = outcome.metrics["val_loss"], alone.metrics["val_loss"]
        expect(
            abs(seen - expected) <= _TOLERANCE,
            f"{which}, rank {rank}: val_loss is {seen:.7g}, one process has {expected:.7g}.",
        )


# Workers run the functions below.


def _averaged_by(subject: Subject, which: str) -> Outcome:
    makers: dict[str, Callable[[], Callback]] = {
        "WeightAveraging": WeightAveraging,
        "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.7),
        "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    }
    return fit(
        subject, Task(batches=2), callbacks=[makers[which]()], max_steps=-1, max_epochs=3, limit_val_batches=1
    )


@check("freezing_while_training")
def freezing_by_name(bench: Bench) -> None:
    """Parameters that a callback freezes by name after an epoch keep their values from then on."""
    expect_same_run(
        bench.run(_frozen), bench.alone(_frozen), tolerance=_TOLERANCE, what="frozen after one epoch"
    )


@check("freezing_while_training")
def unfreezing_by_name(bench: Bench) -> None:
    """Initially frozen parameters train from the epoch in which a callback unfreezes them."""
    expect_same_run(
        bench.run(_thawed), bench.alone(_thawed), tolerance=_TOLERANCE, what="unfrozen after one epoch"
    )


@check("freezing_while_training", "added_parameter_groups")
def base_finetuning(bench: Bench) -> None:
    """BaseFinetuning freezes layers before training, and adds them to the optimizer at unfreezing."""
    expect_same_run(
        bench.run(_finetuned), bench.alone(_finetuned), tolerance=_TOLERANCE, what="BaseFinetuning"
    )


@check("freezing_while_training", "added_parameter_groups")
def backbone_finetuning(bench: Bench) -> None:
    """BackboneFinetuning trains the head first and the backbone later, at the rates of one process."""
    expect_same_run(
        bench.run(_backbone), bench.alone(_backbone), tolerance=_TOLERANCE, what="BackboneFinetuning"
    )


# Workers run the functions below.


def _set_trainable(module: nn.Module, prefix: str, trainable: bool) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(trainable)


class _Freeze(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            _set_trainable(pl_module, "blocks.0.", False)


def _frozen(subject: Subject) -> Outcome:
    # With AdamW, a parameter that is not really frozen keeps moving by momentum and decay.
    return fit(subject, Task(steps=4, batches=2, optimizer="adamw"), callbacks=[_Freeze()])


class _Thaw(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            _set_trainable(pl_module, "blocks.0.", True)


class _StartsFrozen(Plain):
    """Has all parameters in the optimizer from the start."""

    def build(self) -> None:
        super().build()
        _set_trainable(self, "blocks.0.", False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def _thawed(subject: Subject) -> Outcome:
    return fit(subject, Task(model=_StartsFrozen, steps=4, batches=2), callbacks=[_Thaw()])


class _Finetuning(BaseFinetuning):
    """Freezes the first block for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=0.05)


def _finetuned(subject: Subject) -> Outcome:
    return fit(subject, Task(steps=4, batches=2), callbacks=[_Finetuning()])


class _WithBackbone(Plain):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block())
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.head.parameters())


def _backbone(subject: Subject) -> Outcome:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_rate, verbose=False)
    return fit(subject, Task(model=_WithBackbone, steps=6, batches=2), callbacks=[callback])


def _rate(epoch: int) -> float:
    return 1.5
