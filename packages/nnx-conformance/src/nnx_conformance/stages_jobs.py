"""What the ranks do for the checks of `stages`: one module through several Trainers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from nnx_checkpoint.collective import all_gather_object, control_group
from nnx_conformance.stages_models import Branching, Watched
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task, loader, share_of
from nnx_conformance.training import make_trainer, outcome_of

__all__ = [
    "any_order",
    "branch",
    "decide_on_rank_zero",
    "evaluate_then_fit",
    "fit_again",
    "fit_and_validate",
    "fit_further",
    "fit_then_evaluate",
    "fit_until",
    "look_at_evaluation",
    "modes_of_submodules",
    "predict",
    "stop_early",
]

# --- in any order -------------------------------------------------------------------------------------


def _outcome(trainer: Trainer, module: Watched) -> Outcome:
    outcome = outcome_of(trainer, module)
    outcome.notes.update({stage: losses for stage, losses in module.evaluated.items() if losses})
    return outcome


def _watched(task: Task) -> Watched:
    module = (task.model or Watched)(task)
    assert isinstance(module, Watched), "the tasks of this group train watched modules"
    return module


def evaluate_then_fit(subject: Subject, task: Task) -> Outcome:
    """Validate, test, predict, and only then train; every time with a new Trainer."""
    module = _watched(task)
    make_trainer(subject, task, limit_val_batches=1.0).validate(module, verbose=False)
    make_trainer(subject, task).test(module, verbose=False)
    make_trainer(subject, task).predict(module)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    return _outcome(trainer, module)


def fit_then_evaluate(subject: Subject, task: Task, which: Literal["same", "other"]) -> Outcome:
    """Train, then test, predict and validate with the same Trainer or with other ones."""
    module = _watched(task)
    trainer = make_trainer(subject, task, limit_val_batches=1.0, check_val_every_n_epoch=100)
    trainer.fit(module)

    def chosen() -> Trainer:
        return trainer if which == "same" else make_trainer(subject, task, limit_val_batches=1.0)

    chosen().test(module, verbose=False)
    chosen().predict(module)
    chosen().validate(module, verbose=False)
    return _outcome(trainer, module)


def fit_again(subject: Subject, task: Task) -> Outcome:
    """Train with one Trainer, then with another."""
    module = _watched(task)
    make_trainer(subject, task).fit(module)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    return _outcome(trainer, module)


def fit_further(subject: Subject, task: Task) -> Outcome:
    """Train, then train as many steps more with the same Trainer."""
    module = _watched(task)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps += task.steps
    trainer.fit(module)
    return _outcome(trainer, module)


def any_order(subject: Subject, task: Task) -> Outcome:
    """One module through everything that a Trainer does, in an unusual order."""
    module = _watched(task)
    other = make_trainer(subject, task, limit_val_batches=2)
    make_trainer(subject, task).predict(module)
    trainer = make_trainer(subject, task, limit_val_batches=2, check_val_every_n_epoch=100)
    trainer.test(module, verbose=False)
    trainer.fit(module)
    other.validate(module, verbose=False)
    other.predict(module)
    trainer.validate(module, verbose=False)
    make_trainer(subject, task).fit(module)
    other.test(module, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps += task.steps
    trainer.fit(module)
    trainer.predict(module)
    return _outcome(trainer, module)


# --- evaluation -----------------------------------------------------------------------------------------


def fit_and_validate(subject: Subject, task: Task) -> Outcome:
    """Validate before the first step and after every batch."""
    module = _watched(task)
    trainer = make_trainer(subject, task, num_sanity_val_steps=1, limit_val_batches=2, val_check_interval=1)
    trainer.fit(module)
    return _outcome(trainer, module)


def branch(subject: Subject, task: Task) -> Outcome:
    """Test, then train and validate, with a module that is another one in evaluation."""
    module = Branching(task)
    make_trainer(subject, task).test(module, verbose=False)
    trainer = make_trainer(subject, task, limit_val_batches=2, val_check_interval=1)
    trainer.fit(module)
    outcome = _outcome(trainer, module)
    outcome.notes["modes"] = module.modes
    return outcome


class _Partly(Plain):
    """Holds one block in evaluation mode throughout, as one does with a pretrained encoder."""

    def build(self) -> None:
        super().build()
        self.noted: list[tuple[bool, bool]] = []

    def on_train_start(self) -> None:
        self.blocks[0].eval()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.noted.append((self.blocks[0].training, self.blocks[1].training))
        return super().training_step(batch, index)


def modes_of_submodules(subject: Subject, task: Task) -> list[tuple[bool, bool]]:
    """Whether the first and the second block are in training mode, in every training step."""
    module = _Partly(task)
    make_trainer(subject, task, limit_val_batches=1, val_check_interval=1).fit(module)
    return module.noted


class _Looking(Plain):
    """Notes in every step of evaluation whether gradients are computed."""

    def build(self) -> None:
        super().build()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.with_gradients: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        outputs = super().forward(x)
        if not self.training and (outputs.requires_grad or torch.is_grad_enabled()):
            self.with_gradients.add(str(self.trainer.state.fn))
        return outputs


def look_at_evaluation(subject: Subject, task: Task) -> dict[str, Any]:
    """Evaluate in every way and see what that leaves; then train with it."""
    module = _Looking(task)
    make_trainer(subject, task, limit_val_batches=1).validate(module, verbose=False)
    make_trainer(subject, task, limit_test_batches=1).test(module, verbose=False)
    predicted: Any = make_trainer(subject, task, limit_predict_batches=1).predict(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    report = {
        "with gradients": sorted(module.with_gradients),
        "inference": sorted(name for name, tensor in tensors.items() if tensor.is_inference()),
        "gradients": sorted(name for name, p in module.named_parameters() if p.grad is not None),
        "outputs": any(outputs.requires_grad for outputs in predicted or ()),
    }
    trainer = make_trainer(subject, task, limit_val_batches=1, val_check_interval=1)
    trainer.fit(module)
    return {**report, "losses": module.losses}


class _Sharing(Plain):
    """Notes which share of the data it predicts for; after the run a strategy need not know."""

    def predict_dataloader(self) -> DataLoader[Any]:
        self.share = share_of(self.trainer)["rank"]
        return loader(self.task, self.trainer)


def predict(subject: Subject, task: Task) -> tuple[int, list[Tensor]]:
    """This rank's share of the data, and what `Trainer.predict` returns for it."""
    module = _Sharing(task)
    outputs: Any = make_trainer(subject, task).predict(module)
    return module.share, [output.detach() for output in outputs or ()]


# --- where a run ends -----------------------------------------------------------------------------------


def fit_until(subject: Subject, task: Task, settings: dict[str, Any]) -> Outcome:
    """Train until the Trainer's settings end it."""
    module = _watched(task)
    trainer = make_trainer(subject, task, **settings)
    trainer.fit(module)
    if settings.get("limit_test_batches"):
        trainer.test(module, verbose=False)
    outcome = _outcome(trainer, module)
    outcome.notes["end"] = f"after {trainer.global_step} steps, in epoch {trainer.current_epoch}"
    return outcome


class _Decide(Callback):
    """Wants to stop after the second batch, on rank 0 only."""

    def __init__(self) -> None:
        self.decided: dict[str, list[bool]] = {}

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 1:
            wanted = trainer.global_rank == 0
            for name, all_ranks in (("any", False), ("all", True)):
                decision = trainer.strategy.reduce_boolean_decision(wanted, all=all_ranks)
                self.decided[name] = all_gather_object(bool(decision), control_group())
            # Ranks that do not agree would wait for each other: the check tells from what was decided.
            trainer.should_stop = trainer.should_stop or any(self.decided["any"])


def decide_on_rank_zero(subject: Subject, task: Task) -> tuple[dict[str, list[bool]], int]:
    """What every rank is told when rank 0 wants to stop, and how many batches are trained with."""
    module, decide = Plain(task), _Decide()
    make_trainer(subject, task, callbacks=[decide]).fit(module)
    return decide.decided, len(module.losses)


class _RisingMetric(Plain):
    """Logs a metric that stops getting better after three epochs."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("quality", float(min(self.current_epoch, 3)), sync_dist=True)


def stop_early(subject: Subject, task: Task) -> int:
    """Batches until `EarlyStopping` ends the run."""
    module = _RisingMetric(task)
    callback = EarlyStopping("quality", mode="max", patience=2)
    trainer = make_trainer(
        subject, task, callbacks=[callback], limit_val_batches=1, max_steps=-1, max_epochs=20
    )
    trainer.fit(module)
    return len(module.losses)
