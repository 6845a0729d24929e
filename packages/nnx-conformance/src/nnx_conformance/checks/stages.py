"""Fit, validate, test and predict in any order, each with the right weights and mode.

The results of evaluation are compared batch by batch with one process on the same global batches.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nnx_base.ranks import all_gather_object, control_group
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import (
    TOLERANCE,
    expect_equal_losses,
    expect_equal_weights,
    expect_parity,
    expect_same_run,
)
from nnx_conformance.subject import Subject
from nnx_conformance.task import FEATURES, Outcome, Plain, Task, dataset, loader, share_of
from nnx_conformance.training import Watched, make_trainer, outcome_of


class Branching(Watched):
    """Computes different, deterministic outputs in training and in evaluation.

    Attributes:
        modes: By stage, for every step, if all and if any modules were in training mode.

    """

    def build(self) -> None:
        """Add a dropout of everything, and a branch."""
        super().build()
        self.dropout = nn.Dropout(1.0)
        self.modes: dict[str, list[tuple[bool, bool]]] = {"train": [], "evaluate": []}

    def forward(self, x: Tensor) -> Tensor:
        """Halve the hidden layer in training; add the dropped layer in evaluation."""
        flags = [module.training for module in self.modules()]
        self.modes["train" if self.trainer.training else "evaluate"].append((all(flags), any(flags)))
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.training:
            hidden = hidden * 0.5
        return self.head(hidden + self.dropout(torch.sin(hidden)))  # type: ignore[no-any-return]


class CutSampler(Sampler[list[int]]):
    """Splits the samples into global batches of given sizes, distributed evenly over the ranks.

    Args:
        sizes: The sizes of the global batches.
        num_replicas: Ranks that share the data.
        rank: This rank's number among them.

    """

    def __init__(self, sizes: Sequence[int], *, num_replicas: int, rank: int) -> None:
        self.sizes, self.replicas, self.rank = tuple(sizes), num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in pairwise([0, *accumulate(self.sizes)]):
            yield torch.arange(start, end).tensor_split(self.replicas)[self.rank].tolist()

    def __len__(self) -> int:
        return len(self.sizes)


class _Cut(Watched):
    """Reads its data in batches of given sizes."""

    def cut(self, sizes: Sequence[int]) -> DataLoader[Any]:
        data = dataset(self.task)
        return DataLoader(data, batch_sampler=CutSampler(sizes, **share_of(self.trainer)))


class VaryingBatches(_Cut):
    """Has a different number of samples in every training step, sometimes more than in the first."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Choose sizes that all world sizes divide."""
        return self.cut((12, 6, 18, 12, 24))


class UnequalShares(_Cut):
    """Gives the ranks different numbers of samples in the last batches, with equal weight per sample."""

    sizes = (12, 7, 12, 5)

    def train_dataloader(self) -> DataLoader[Any]:
        """Choose sizes that some world sizes do not divide."""
        return self.cut(self.sizes)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Scale the loss so that its mean over the ranks is the mean over all samples."""
        replicas = share_of(self.trainer)["num_replicas"]
        count = self.sizes[index] * FEATURES
        loss = mse_loss(self(batch[0]), batch[1], reduction="sum") * (replicas / count)
        self.record(loss)
        return loss


class OtherBatchesInEvaluation(_Cut):
    """Evaluates in batches of other sizes than in training."""

    def val_dataloader(self) -> DataLoader[Any]:
        """Choose smaller and larger sizes than in training."""
        return self.cut((6, 18, 12, 24))

    test_dataloader = predict_dataloader = val_dataloader


class EmptyValidation(Watched):
    """Has an empty validation loader."""

    def val_dataloader(self) -> DataLoader[Any]:
        nothing = torch.empty(0, FEATURES, dtype=self.task.torch_dtype)
        return DataLoader(TensorDataset(nothing, nothing), batch_size=4)


def _outcome(trainer: Trainer, module: Watched) -> Outcome:
    outcome = outcome_of(trainer, module)
    outcome.notes.update({stage: losses for stage, losses in module.evaluated.items() if losses})
    return outcome


def _watched(task: Task) -> Watched:
    module = (task.model or Watched)(task)
    assert isinstance(module, Watched), "the tasks of this group train watched modules"
    return module


def evaluate_then_fit(subject: Subject, task: Task) -> Outcome:
    """Validate, test, predict, and then train, each with a new Trainer."""
    module = _watched(task)
    make_trainer(subject, task, limit_val_batches=1.0).validate(module, verbose=False)
    make_trainer(subject, task).test(module, verbose=False)
    make_trainer(subject, task).predict(module)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    return _outcome(trainer, module)


def fit_then_evaluate(subject: Subject, task: Task, which: Literal["same", "other"]) -> Outcome:
    """Train, then test, predict and validate with the same Trainer or with new ones."""
    module = _watched(task)
    trainer = make_trainer(subject, task, limit_val_batches=1.0, check_val_every_n_epoch=100)
    trainer.fit(module)

    def chosen() -> Trainer:
        return trainer if which == "same" else make_trainer(subject, task, limit_val_batches=1.0)

    chosen().test(module, verbose=False)
    chosen().predict(module)
    chosen().validate(module, verbose=False)
    return _outcome(trainer, module)


def fit_again_job(subject: Subject, task: Task) -> Outcome:
    """Train with one Trainer, then with another."""
    module = _watched(task)
    make_trainer(subject, task).fit(module)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    return _outcome(trainer, module)


def fit_further_job(subject: Subject, task: Task) -> Outcome:
    """Train, then train for as many further steps with the same Trainer."""
    module = _watched(task)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps += task.steps
    trainer.fit(module)
    return _outcome(trainer, module)


def any_order_job(subject: Subject, task: Task) -> Outcome:
    """Run one module through all stages, in an unusual order."""
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


def fit_and_validate(subject: Subject, task: Task) -> Outcome:
    """Validate before the first step and after every batch."""
    module = _watched(task)
    trainer = make_trainer(subject, task, num_sanity_val_steps=1, limit_val_batches=2, val_check_interval=1)
    trainer.fit(module)
    return _outcome(trainer, module)


def branch(subject: Subject, task: Task) -> Outcome:
    """Test, then train and validate, with a module that computes differently in evaluation."""
    module = Branching(task)
    make_trainer(subject, task).test(module, verbose=False)
    trainer = make_trainer(subject, task, limit_val_batches=2, val_check_interval=1)
    trainer.fit(module)
    outcome = _outcome(trainer, module)
    outcome.notes["modes"] = module.modes
    return outcome


class _Partly(Plain):
    """Holds one block in evaluation mode throughout, like a pretrained encoder."""

    def build(self) -> None:
        super().build()
        self.noted: list[tuple[bool, bool]] = []

    def on_train_start(self) -> None:
        self.blocks[0].eval()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.noted.append((self.blocks[0].training, self.blocks[1].training))
        return super().training_step(batch, index)


def modes_of_submodules(subject: Subject, task: Task) -> list[tuple[bool, bool]]:
    """Return the training mode of the first and the second block, for every training step."""
    module = _Partly(task)
    make_trainer(subject, task, limit_val_batches=1, val_check_interval=1).fit(module)
    return module.noted


class _Looking(Plain):
    """Records in every evaluation step if gradients are enabled."""

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
    """Run each kind of evaluation, record its traces, then train."""
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
    """Records the data share for which it predicts, because the strategy may forget it after the run."""

    def predict_dataloader(self) -> DataLoader[Any]:
        self.share = share_of(self.trainer)["rank"]
        return loader(self.task, self.trainer)


def predict(subject: Subject, task: Task) -> tuple[int, list[Tensor]]:
    """Return this rank's share of the data, and the result of `Trainer.predict`."""
    module = _Sharing(task)
    outputs: Any = make_trainer(subject, task).predict(module)
    return module.share, [output.detach() for output in outputs or ()]


def fit_until(subject: Subject, task: Task, settings: dict[str, Any]) -> Outcome:
    """Train until the Trainer's settings end the run."""
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
            # Stop all ranks even if they disagree, because they would wait for each other.
            trainer.should_stop = trainer.should_stop or any(self.decided["any"])


def decide_on_rank_zero(subject: Subject, task: Task) -> tuple[dict[str, list[bool]], int]:
    """Return every rank's decisions when rank 0 wants to stop, and the number of batches."""
    module, decide = Plain(task), _Decide()
    make_trainer(subject, task, callbacks=[decide]).fit(module)
    return decide.decided, len(module.losses)


class _RisingMetric(Plain):
    """Logs a metric that stops improving after three epochs."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("quality", float(min(self.current_epoch, 3)), sync_dist=True)


def stop_early(subject: Subject, task: Task) -> int:
    """Return the number of batches until `EarlyStopping` ends the run."""
    module = _RisingMetric(task)
    callback = EarlyStopping("quality", mode="max", patience=2)
    trainer = make_trainer(
        subject, task, callbacks=[callback], limit_val_batches=1, max_steps=-1, max_epochs=20
    )
    trainer.fit(module)
    return len(module.losses)


_TASK = Task(batches=2, steps=2)


def _compare(bench: Bench, job: Callable[..., Outcome], task: Task, *args: Any) -> None:
    """Compare training, final weights and evaluation results with one process."""
    alone: Outcome = bench.alone(job, task, *args)
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(job, task, *args, world_size=world_size)
        _expect_same_evaluation(ranks, alone)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype], what="training")


def _expect_same_evaluation(ranks: list[Outcome], alone: Outcome) -> None:
    for rank, outcome in enumerate(ranks):
        for stage in sorted({"validate", "test", "predict"} & alone.notes.keys()):
            expected = alone.notes[stage]
            where = f"{stage}, rank {rank} of {len(ranks)}"
            seen = outcome.notes.get(stage, [])
            expect_equal_losses(seen, expected, tolerance=TOLERANCE["float32"], where=where)


@check()
def evaluation_before_fit(bench: Bench) -> None:
    """A module can be validated, tested and predicted with before training, and then trains as usual."""
    _compare(bench, evaluate_then_fit, _TASK)


@check()
def evaluation_after_fit(bench: Bench) -> None:
    """A new Trainer tests, predicts and validates with the trained weights."""
    _compare(bench, fit_then_evaluate, _TASK, "other")


@check()
def evaluation_with_the_same_trainer(bench: Bench) -> None:
    """The Trainer of the training tests, predicts and validates with the trained weights."""
    _compare(bench, fit_then_evaluate, _TASK, "same")


@check()
def fit_again_with_new_trainer(bench: Bench) -> None:
    """A second Trainer continues from the trained weights."""
    _compare(bench, fit_again_job, _TASK)


@check(of_adapter=True)
def fit_again_with_same_trainer(bench: Bench) -> None:
    """The same Trainer with more steps continues from the trained weights."""
    _compare(bench, fit_further_job, _TASK)


@check(full=True)
def stages_in_any_order(bench: Bench) -> None:
    """A module runs through all stages in an unusual order, always with its current weights."""
    _compare(bench, any_order_job, _TASK)


_VALIDATED = Task(model=Watched, batches=3)
_BRANCHING = Task(batches=3)


@check()
def validation_sees_current_weights(bench: Bench) -> None:
    """Validation within fit, and before its first step, uses the current weights."""
    alone: Outcome = bench.alone(fit_and_validate, _VALIDATED)
    for world_size in bench.world_sizes:
        ranks = bench.run(fit_and_validate, _VALIDATED, world_size=world_size)
        _expect_same_evaluation(ranks, alone)


@check()
def validation_keeps_training_unchanged(bench: Bench) -> None:
    """Training after validation is the same as without validation."""
    without = bench.train_alone(Task(batches=3))
    for world_size in bench.world_sizes:
        ranks = bench.run(fit_and_validate, _VALIDATED, world_size=world_size)
        expect_same_run(ranks, without, tolerance=TOLERANCE["float32"])


@check("gradient_accumulation")
def validation_while_gradients_accumulate(bench: Bench) -> None:
    """Validation between two batches of one step keeps the accumulated gradients."""
    task = Task(model=Watched, batches=4, steps=2, accumulate=2)
    without = bench.train_alone(Task(batches=4, steps=2, accumulate=2))
    for world_size in bench.world_sizes:
        ranks = bench.run(fit_and_validate, task, world_size=world_size)
        expect_same_run(ranks, without, tolerance=TOLERANCE["float32"])


@check(of_adapter=True)
def evaluation_uses_eval_mode(bench: Bench) -> None:
    """Every module is in evaluation mode during evaluation: dropout is off and `self.training` False."""
    alone: Outcome = bench.alone(branch, _BRANCHING)
    for world_size in bench.world_sizes:
        ranks = bench.run(branch, _BRANCHING, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            in_training = [any_part for _, any_part in outcome.notes["modes"]["evaluate"]]
            expect(
                not any(in_training),
                f"rank {rank}: modules were in training mode in {sum(in_training)} of {len(in_training)} "
                "steps of evaluation.",
            )
        _expect_same_evaluation(ranks, alone)


@check(of_adapter=True)
def training_mode_after_validation(bench: Bench) -> None:
    """Every module is in training mode again after validation: dropout is on and `self.training` True."""
    alone: Outcome = bench.alone(branch, _BRANCHING)
    for world_size in bench.world_sizes:
        ranks = bench.run(branch, _BRANCHING, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            wrong = [i for i, (every_part, _) in enumerate(outcome.notes["modes"]["train"]) if not every_part]
            expect(not wrong, f"rank {rank}: modules were in evaluation mode in training steps {wrong}.")
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check(of_adapter=True)
def submodules_keep_their_mode(bench: Bench) -> None:
    """A submodule that the user put into evaluation mode stays in it after validation."""
    for rank, seen in enumerate(bench.run(modes_of_submodules, Task(batches=3))):
        expect(
            seen == [(False, True)] * 3,
            f"rank {rank}: the first block was put into evaluation mode and the second was not; the modes "
            f"in the training steps were {seen}.",
        )


@check()
def evaluation_computes_no_gradients(bench: Bench) -> None:
    """Evaluation runs without gradients and leaves neither gradients nor inference tensors behind."""
    task = Task(batches=2, steps=2)
    for rank, report in enumerate(bench.run(look_at_evaluation, task)):
        where = f"rank {rank}"
        expect(not report["with gradients"], f"{where}: gradients are on during {report['with gradients']}.")
        expect(not report["outputs"], f"{where}: the outputs of predict require gradients.")
        expect(not report["gradients"], f"{where}: evaluation left gradients of {report['gradients']}.")
        expect(
            not report["inference"],
            f"{where}: evaluation left inference tensors, which cannot be trained: {report['inference']}.",
        )
        expect(len(report["losses"]) == 2, f"{where}: {len(report['losses'])} steps, expected 2.")


@check(of_adapter=True)
def predictions_per_rank(bench: Bench) -> None:
    """`Trainer.predict` returns each rank's outputs for its own share of the data, in order."""
    task = Task(batches=3, last_batch=6)
    _, expected = bench.alone(predict, task)
    for world_size in bench.world_sizes:
        by_share = dict(bench.run(predict, task, world_size=world_size))
        for batch, wanted in enumerate(expected):
            shares = [by_share[share][batch : batch + 1] for share in sorted(by_share)]
            seen = torch.cat([output for outputs in shares for output in outputs] or [torch.empty(0)])
            expect_equal_weights(
                {"outputs": seen}, {"outputs": wanted}, tolerance=1e-5, where=f"predicted batch {batch}"
            )


@check()
def smaller_last_batch(bench: Bench) -> None:
    """The last batch of an epoch may be smaller, in training and evaluation."""
    task = Task(model=Watched, batches=2, last_batch=6, steps=4)
    _compare(bench, fit_and_validate, task)


@check()
def last_batch_of_one_sample(bench: Bench) -> None:
    """The last batch may give each rank a single sample."""
    for world_size in bench.world_sizes:
        task = Task(batches=2, last_batch=world_size, steps=4)
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, bench.train_alone(task), tolerance=TOLERANCE["float32"])


@check()
def batch_size_differs_by_rank(bench: Bench) -> None:
    """Ranks may have different numbers of samples in a batch."""
    expect_parity(bench, Task(model=UnequalShares, batches=3, steps=8))


@check()
def batch_size_changes(bench: Bench) -> None:
    """Each step may have a different batch size, even a larger one than the first."""
    expect_parity(bench, Task(model=VaryingBatches, batches=6, steps=5))


@check()
def evaluation_batch_size_differs(bench: Bench) -> None:
    """Evaluation may use other batch sizes than training."""
    task = Task(model=OtherBatchesInEvaluation, batches=5, steps=2)
    _compare(bench, fit_then_evaluate, task, "other")


@check(of_adapter=True)
def empty_validation(bench: Bench) -> None:
    """Lightning skips an empty validation loader."""
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 1, "max_steps": -1, "max_epochs": 2}
    _ends_alike(bench, Task(model=EmptyValidation, batches=2), settings)


def _ends_alike(bench: Bench, task: Task, settings: dict[str, Any]) -> None:
    """Expect that a run with these Trainer settings ends at the same point as one process."""
    alone: Outcome = bench.alone(fit_until, task, settings)
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(fit_until, task, settings, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            seen, expected = outcome.notes["end"], alone.notes["end"]
            expect(seen == expected, f"rank {rank}: the run ended {seen}; in one process {expected}.")
        _expect_same_evaluation(ranks, alone)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"], what="training")


@check(of_adapter=True)
def max_epochs_ends_fit(bench: Bench) -> None:
    """`max_epochs` ends a run after that many epochs."""
    _ends_alike(bench, _TASK, {"max_steps": -1, "max_epochs": 2})


@check(of_adapter=True)
def limit_batches(bench: Bench) -> None:
    """`limit_train_batches`, `limit_val_batches` and `limit_test_batches` work as numbers and fractions."""
    limits = {"limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1}
    settings = {**limits, "max_steps": -1, "max_epochs": 2}
    _ends_alike(bench, Task(batches=4), settings)


@check(of_adapter=True)
def one_rank_stops_all(bench: Bench) -> None:
    """One rank's wish stops all ranks with `any`, and only a unanimous wish does with `all`."""
    ranks = bench.run(decide_on_rank_zero, Task(steps=4), world_size=2)
    for rank, (decided, batches) in enumerate(ranks):
        where = f"rank {rank}: rank 0 alone wants to stop"
        expect(all(decided["any"]), f"{where}, and `any` returned {decided['any']}.")
        expect(not any(decided["all"]), f"{where}, and `all` returned {decided['all']}.")
        expect(batches == 2, f"{where} after batch 2; training ended after batch {batches}.")


@check(of_adapter=True)
def early_stopping(bench: Bench) -> None:
    """`EarlyStopping` on a logged metric ends the run at the same step on every rank."""
    task = Task(batches=1)
    expected = bench.alone(stop_early, task)
    for world_size in bench.world_sizes:
        seen = bench.run(stop_early, task, world_size=world_size)
        expect(
            seen == [expected] * world_size,
            f"training ended after {seen} batches on the {world_size} ranks; alone after {expected}.",
        )
