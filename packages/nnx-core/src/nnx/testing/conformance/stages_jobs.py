"""What the ranks do for the checks of `stages`: modules that watch themselves, and what Trainers do to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nnx.collective import all_gather_object, is_distributed
from nnx.testing.conformance.data import FEATURES, dataset, share_of
from nnx.testing.conformance.models import Plain
from nnx.testing.conformance.subject import Subject
from nnx.testing.conformance.task import Outcome, Task
from nnx.testing.conformance.training import make_trainer, mean_over_ranks, outcome_of

__all__ = [
    "Branching",
    "CutSampler",
    "EmptyValidation",
    "OtherBatchesInEvaluation",
    "UnequalShares",
    "VaryingBatches",
    "Watched",
    "any_order",
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

# --- modules ------------------------------------------------------------------------------------------


class Watched(Plain):
    """Remembers what evaluation gives.

    Attributes:
        evaluated: By stage, the mean over all ranks of every batch's loss.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.evaluated: dict[str, list[float]] = {"validate": [], "test": [], "predict": []}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Note the loss."""
        self.evaluated["validate"].append(mean_over_ranks(self.loss(batch).item()))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Note the loss."""
        self.evaluated["test"].append(mean_over_ranks(self.loss(batch).item()))

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Note the size of what comes out, and give it."""
        outputs: Tensor = self(batch[0])
        self.evaluated["predict"].append(mean_over_ranks(outputs.square().mean().item()))
        return outputs


class Branching(Watched):
    """Computes something else in training than in evaluation, without chance.

    Attributes:
        modes: By stage, whether all modules, or any, were in training mode in every step.
    """

    def build(self) -> None:
        """A dropout that drops everything makes the difference, and so does a branch."""
        super().build()
        self.dropout = nn.Dropout(1.0)
        self.modes: dict[str, list[tuple[bool, bool]]] = {"train": [], "evaluate": []}

    def forward(self, x: Tensor) -> Tensor:
        """Training halves the hidden layer; evaluation adds to it what training drops."""
        flags = [part.training for part in self.modules()]
        self.modes["train" if torch.is_grad_enabled() else "evaluate"].append((all(flags), any(flags)))
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.training:
            hidden = hidden * 0.5
        return self.head(hidden + self.dropout(torch.sin(hidden)))  # type: ignore[no-any-return]


class CutSampler(Sampler[list[int]]):
    """Cuts the samples into global batches of given sizes, each over the ranks as evenly as it goes.

    Args:
        sizes: Of the global batches.
        num_replicas: Ranks that share the data.
        rank: Which of them this is.
    """

    def __init__(self, sizes: Sequence[int], *, num_replicas: int, rank: int) -> None:
        self.sizes, self.replicas, self.rank = tuple(sizes), num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in pairwise([0, *accumulate(self.sizes)]):
            yield torch.arange(start, end).tensor_split(self.replicas)[self.rank].tolist()

    def __len__(self) -> int:
        return len(self.sizes)


class _Cut(Watched):
    """Reads its data in batches of chosen sizes."""

    def cut(self, sizes: Sequence[int]) -> DataLoader[Any]:
        data = dataset(self.task)
        return DataLoader(data, batch_sampler=CutSampler(sizes, **share_of(self.trainer)))


class VaryingBatches(_Cut):
    """Every training step has another number of samples, some more than the first."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Sizes that all world sizes divide."""
        return self.cut((12, 6, 18, 12, 24))


class UnequalShares(_Cut):
    """In the last batches the ranks have different numbers of samples; no sample counts more for it."""

    sizes = (12, 7, 12, 5)

    def train_dataloader(self) -> DataLoader[Any]:
        """Sizes that not all world sizes divide."""
        return self.cut(self.sizes)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The mean over the ranks of this loss is the mean over all samples."""
        replicas = share_of(self.trainer)["num_replicas"]
        count = self.sizes[index] * FEATURES
        loss = mse_loss(self(batch[0]), batch[1], reduction="sum") * (replicas / count)
        self.record(loss)
        return loss


class OtherBatchesInEvaluation(_Cut):
    """Evaluates in batches of other sizes than it is trained in."""

    def val_dataloader(self) -> DataLoader[Any]:
        """Smaller ones and larger ones than in training."""
        return self.cut((6, 18, 12, 24))

    test_dataloader = predict_dataloader = val_dataloader


class EmptyValidation(Watched):
    """Has nothing to validate with."""

    def val_dataloader(self) -> DataLoader[Any]:
        """A loader of no samples."""
        nothing = torch.empty(0, FEATURES, dtype=self.task.torch_dtype)
        return DataLoader(TensorDataset(nothing, nothing), batch_size=4)


# --- one module through several Trainers ----------------------------------------------------------------


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
    outcome = _outcome(trainer, module)
    outcome.notes["steps"] = [float(trainer.global_step)]
    return outcome


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
    """Validate before the first step and after every batch, and test in the end."""
    module = _watched(task)
    trainer = make_trainer(subject, task, num_sanity_val_steps=1, limit_val_batches=2, val_check_interval=1)
    trainer.fit(module)
    make_trainer(subject, task).test(module, verbose=False)
    outcome = _outcome(trainer, module)
    if isinstance(module, Branching):
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
        self.register_buffer("count", torch.zeros(()))
        self.with_gradients: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        outputs = super().forward(x)
        if not self.training and (outputs.requires_grad or torch.is_grad_enabled()):
            self.with_gradients.add(str(self.trainer.state.fn))
        return outputs


def look_at_evaluation(subject: Subject, task: Task) -> dict[str, Any]:
    """Evaluate in every way and see what that leaves; then train with it."""
    module = _Looking(task)
    make_trainer(subject, task, limit_val_batches=1).validate(module, verbose=False)
    make_trainer(subject, task, limit_test_batches=1).test(module, verbose=False)
    predicted = make_trainer(subject, task, limit_predict_batches=1).predict(module)
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


def predict(subject: Subject, task: Task) -> tuple[int, list[Tensor]]:
    """This rank's share of the data, and what `Trainer.predict` returns for it."""
    module = Plain(task)
    trainer = make_trainer(subject, task)
    outputs = trainer.predict(module)
    return share_of(trainer)["rank"], [] if outputs is None else list(outputs)


# --- where a run ends -----------------------------------------------------------------------------------


def fit_until(subject: Subject, task: Task, settings: dict[str, Any]) -> Outcome:
    """Train until the Trainer's settings end it."""
    module = _watched(task)
    trainer = make_trainer(subject, task, **settings)
    trainer.fit(module)
    if settings.get("limit_test_batches"):
        trainer.test(module, verbose=False)
    outcome = _outcome(trainer, module)
    outcome.notes["steps and epochs"] = [float(trainer.global_step), float(trainer.current_epoch)]
    return outcome


def _of_all_ranks(value: bool) -> list[bool]:
    return all_gather_object(value, None) if is_distributed() else [value]


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
                self.decided[name] = _of_all_ranks(bool(decision))
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
