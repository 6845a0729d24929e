"""What is in a checkpoint: the model's own names and values, once, and only what was asked for."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

import nnx_checkpoint
import nnx_core
from nnx_conformance.check import Bench, abbreviated, check, expect, expect_equal_weights
from nnx_conformance.checks.checkpoints.runs import (
    SAVED_AFTER,
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    error_of,
    run,
    trainer_for,
)
from nnx_conformance.checks.checkpoints.snapshots import expect_exactly
from nnx_conformance.checks.checkpoints.stored import open_saved, path_in, save, saved_checkpoint
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import outcome_of


@check(of_adapter=True)
def checkpoint_is_whole(bench: Bench) -> None:
    """What is saved verifies against its checksums."""
    saved_checkpoint(bench)
    damage = nnx_checkpoint.verify(path_in(bench))
    expect(not damage, f"`nnx ckpt verify` finds {'; '.join(map(str, damage))}.")


@check()
def names_in_the_checkpoint(bench: Bench) -> None:
    """Weights and optimizer state are stored under the model's own names."""
    alone: Record = bench.alone(save, TASK, "")
    stored, _ = saved_checkpoint(bench)
    wanted = {f"model.{name}" for name in alone.saved.weights}
    for key in alone.saved.optimizers:
        index, _, name = key.partition(".")
        wanted.add(f"optim.{index}.state.{name}")
    missing, extra = sorted(wanted - stored.tensors.keys()), sorted(stored.tensors.keys() - wanted)
    expect(
        not missing and not extra,
        f"the checkpoint lacks {abbreviated(missing)} and has {abbreviated(extra)} instead.",
    )


@check()
def stored_once(bench: Bench) -> None:
    """Every element is stored once over all ranks."""
    options = {**bench.identity.init_params, **bench.subject.options}
    if options.get("state_dict_type", "deduped") != "deduped":
        bench.not_applicable("its state_dict_type asks for every rank's own copy")
    stored, _ = saved_checkpoint(bench)
    for name, entry in stored.tensors.items():
        elements = sum(piece.box.numel for piece in entry.pieces)
        expect(
            elements == entry.numel, f"'{name}' has {entry.numel} elements, of which {elements} are stored."
        )


@check()
def values_in_the_checkpoint(bench: Bench) -> None:
    """A checkpoint holds the weights of the step in which it was saved, to the bit."""
    stored, saved = saved_checkpoint(bench)
    weights = {name: stored.read(f"model.{name}") for name in saved.saved.weights}
    expect_exactly(weights, saved.saved.weights, where="in the checkpoint")


@check()
def saving_in_the_background(bench: Bench) -> None:
    """A save in the background holds the values of the moment it was asked for, though training went on."""
    saved: Record = bench.run(_save_in_background, TASK, path_in(bench))[0]
    stored = open_saved(bench)
    weights = {name: stored.read(f"model.{name}") for name in saved.saved.weights}
    expect_exactly(weights, saved.saved.weights, where="saved in the background")
    state = {key: stored.read(_optimizer_name(key)) for key in saved.saved.optimizers}
    expect_exactly(state, saved.saved.optimizers, where="state of the optimizer, saved in the background")


@check(of_adapter=True)
def weights_only_has_no_optimizer(bench: Bench) -> None:
    """`save_weights_only` saves the weights, and no optimizer state."""
    stored, saved = saved_checkpoint(bench, weights_only=True)
    others = sorted(name for name in stored.tensors if not name.startswith("model."))
    expect(not others, f"besides the weights the checkpoint holds {abbreviated(others)}.")
    entries = sorted({"optimizer_states", "lr_schedulers"} & stored.objects["trainer"].keys())
    entries += ["optim"] if "optim" in stored.objects else []
    expect(not entries, f"besides the weights the checkpoint has {entries}.")
    names = {name.removeprefix("model.") for name in stored.tensors}
    expect(names == saved.saved.weights.keys(), f"the checkpoint has the weights {sorted(names)}.")


@check(of_adapter=True)
def weights_only_evaluates(bench: Bench) -> None:
    """A checkpoint of weights only is evaluated, and is refused for resuming on every rank."""
    alone: Record = bench.alone(save, TASK, "")
    for rank, (error, evaluated) in enumerate(bench.run(_use_weights_only, TASK, path_in(bench))):
        where = f"rank {rank}, weights only"
        expect("optimizer" in error, f"{where}: resuming ended with {error or 'no error'!r}.")
        expect_equal_weights(evaluated.weights, alone.saved.weights, tolerance=TOLERANCE, where=where)


@check(of_adapter=True)
def loads_in_one_process(bench: Bench) -> None:
    """The weights load into a plain module in one process, by `nnx.load_from_checkpoint`."""
    saved: Record = bench.run(save, TASK, path_in(bench))[0]
    (weights,) = bench.run(_load_plainly, TASK, path_in(bench), world_size=1)
    expect_exactly(weights, saved.saved.weights, where="in one process")


@check(of_adapter=True)
def evaluates_a_checkpoint(bench: Bench) -> None:
    """`validate` and `test` with `ckpt_path` evaluate the weights that were saved."""
    saved: Record = bench.run(save, TASK, path_in(bench))[0]
    alone: Outcome = bench.alone(_evaluate_after, TASK)
    for rank, (validated, tested) in enumerate(bench.run(_evaluate, TASK, path_in(bench))):
        for outcome, metric in ((validated, "val_loss"), (tested, "test_loss")):
            where = f"rank {rank}, {metric}"
            expect_exactly(outcome.weights, saved.saved.weights, where=where)
            loss, wanted = outcome.metrics[metric], alone.metrics["val_loss"]
            expect(abs(loss - wanted) <= 1e-6, f"{where} is {loss:.8g}, one process has {wanted:.8g}.")


def _optimizer_name(key: str) -> str:
    """The logical name of what a `Snapshot` calls ``"<optimizer>.<parameter>.<name>"``."""
    index, _, name = key.partition(".")
    return f"optim.{index}.state.{name}"


# --- jobs -----------------------------------------------------------------------------------------


def _save_in_background(subject: Subject, task: Task, path: str) -> Record:
    return run(subject, task, paths={SAVED_AFTER: path}, in_background=True)


def _use_weights_only(subject: Subject, task: Task, path: str) -> tuple[str, Outcome]:
    """How resuming from weights only fails, and evaluating them with another model."""
    save(subject, task, path, weights_only=True)
    error = error_of(lambda: run(subject, task, ckpt_path=path))
    return error, _validate(subject, replace(task, seed=task.seed + 1), path)


def _load_plainly(subject: Subject, task: Task, path: str) -> dict[str, Tensor]:
    module = nnx_core.load_from_checkpoint(Resumable, path, task=replace(task, seed=task.seed + 1))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _validate(subject: Subject, task: Task, path: str) -> Outcome:
    module = task.module()
    trainer = trainer_for(subject, task, limit_val_batches=2)
    trainer.validate(module, ckpt_path=path, verbose=False)
    return outcome_of(trainer, module)


def _evaluate(subject: Subject, task: Task, path: str) -> tuple[Outcome, Outcome]:
    """Validate and test a checkpoint with models of other weights."""
    other = replace(task, seed=task.seed + 1)
    validated = _validate(subject, other, path)
    module = other.module()
    trainer = trainer_for(subject, other, limit_test_batches=2)
    trainer.test(module, ckpt_path=path, verbose=False)
    return validated, outcome_of(trainer, module)


def _evaluate_after(subject: Subject, task: Task) -> Outcome:
    """Validate what was trained."""
    module = task.module()
    trainer = trainer_for(subject, replace(task, steps=SAVED_AFTER), limit_val_batches=2)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    return outcome_of(trainer, module)
