"""A checkpoint holds the model's own names and values, once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import nnx_checkpoint
import nnx_core
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints.runs import (
    SAVED_AFTER,
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    error_of,
    expect_exactly,
    open_saved,
    path_in,
    run,
    save,
    saved_checkpoint,
    trainer_for,
)
from nnx_conformance.comparing import abbreviated, expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import outcome_of


@check(of_adapter=True)
def checksums_verify(bench: Bench) -> None:
    """A saved checkpoint verifies against its checksums."""
    saved_checkpoint(bench)
    damage = nnx_checkpoint.verify(path_in(bench))
    expect(not damage, f"`nnx ckpt verify` found {'; '.join(map(str, damage))}.")


@check()
def names_in_the_checkpoint(bench: Bench) -> None:
    """Weights and optimizer state are stored under the model's own names."""
    alone: Record = bench.alone(save, TASK, "")
    stored, _ = saved_checkpoint(bench)
    wanted = {f"model.{name}" for name in alone.saved.weights}
    for key in alone.saved.optimizers:
        index, _, name = key.partition(".")
        wanted.add(f"optim.{index}.state.{name}")
    of_model = {
        key for key in stored.tensors if key.startswith("model.") or _parameter_of(key) in alone.saved.weights
    }  # state of an engine may be beside that of the model's parameters
    missing, extra = sorted(wanted - stored.tensors.keys()), sorted(of_model - wanted)
    expect(
        not missing and not extra,
        f"the checkpoint lacks {abbreviated(missing)} and has {abbreviated(extra)} instead.",
    )


@check()
def elements_stored_once(bench: Bench) -> None:
    """Every element is stored once over all ranks."""
    options = {**bench.identity.init_params, **bench.subject.options}
    if options.get("state_dict_type", "deduped") != "deduped":
        bench.not_applicable("its state_dict_type stores every rank's own copy")
    stored, _ = saved_checkpoint(bench)
    for name, entry in stored.tensors.items():
        elements = sum(piece.box.numel for piece in entry.pieces)
        expect(
            elements == entry.numel, f"'{name}' has {entry.numel} elements, of which {elements} are stored."
        )


@check()
def values_in_the_checkpoint(bench: Bench) -> None:
    """A checkpoint holds the weights of the step in which it was saved, bitwise."""
    stored, saved = saved_checkpoint(bench)
    weights = {name: stored.read(f"model.{name}") for name in saved.saved.weights}
    expect_exactly(weights, saved.saved.weights, where="in the checkpoint")


@check()
def async_save(bench: Bench) -> None:
    """A background save holds the values of its call, while training continues."""
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
    """A weights-only checkpoint can be evaluated, and every rank refuses to resume from it."""
    alone: Record = bench.alone(save, TASK, "")
    for rank, (error, evaluated) in enumerate(bench.run(_use_weights_only, TASK, path_in(bench))):
        where = f"rank {rank}, weights only"
        expect(
            "optimizer" in error,
            f"{where}: resuming ended with {error or 'no error'!r}, expected an error about the optimizer.",
        )
        expect_equal_weights(evaluated.weights, alone.saved.weights, tolerance=TOLERANCE, where=where)


@check(of_adapter=True)
def load_in_one_process(bench: Bench) -> None:
    """The weights load into a plain module in one process, by `nnx.load_from_checkpoint`."""
    saved: Record = bench.run(save, TASK, path_in(bench))[0]
    (weights,) = bench.run(_load_plainly, TASK, path_in(bench), world_size=1)
    expect_exactly(weights, saved.saved.weights, where="in one process")


@check(of_adapter=True)
def evaluate_a_checkpoint(bench: Bench) -> None:
    """`validate` and `test` with `ckpt_path` evaluate the saved weights."""
    saved: Record = bench.run(save, TASK, path_in(bench))[0]
    alone: Outcome = bench.alone(_evaluate_after, TASK)
    for rank, (validated, tested) in enumerate(bench.run(_evaluate, TASK, path_in(bench))):
        for outcome, metric in ((validated, "val_loss"), (tested, "test_loss")):
            where = f"rank {rank}, {metric}"
            expect_exactly(outcome.weights, saved.saved.weights, where=where)
            loss, wanted = outcome.metrics[metric], alone.metrics["val_loss"]
            message = f"{where} is {loss:.8g}, one process has {wanted:.8g}."
            expect(abs(loss - wanted) <= 1e-6, message, of_numbers=True)


def _parameter_of(key: str) -> str:
    """Return the parameter of an optimizer's entry ``"optim.<optimizer>.state.<parameter>.<name>"``."""
    return key.partition(".state.")[2].rpartition(".")[0]


def _optimizer_name(key: str) -> str:
    """Return the logical name for the snapshot's ``"<optimizer>.<parameter>.<name>"``."""
    index, _, name = key.partition(".")
    return f"optim.{index}.state.{name}"


def _save_in_background(subject: Subject, task: Task, path: str) -> Record:
    return run(subject, task, paths={SAVED_AFTER: path}, in_background=True)


def _use_weights_only(subject: Subject, task: Task, path: str) -> tuple[str, Outcome]:
    """Return the error of resuming from weights only, and the evaluation with another model."""
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
    """Validate and test a checkpoint, with models of other initial weights."""
    other = replace(task, seed=task.seed + 1)
    validated = _validate(subject, other, path)
    module = other.module()
    trainer = trainer_for(subject, other, limit_test_batches=2)
    trainer.test(module, ckpt_path=path, verbose=False)
    return validated, outcome_of(trainer, module)


def _evaluate_after(subject: Subject, task: Task) -> Outcome:
    """Validate the trained weights."""
    module = task.module()
    trainer = trainer_for(subject, replace(task, steps=SAVED_AFTER), limit_val_batches=2)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    return outcome_of(trainer, module)


# Checkpoint hooks of modules and callbacks may add entries and change them.


_ENTRY = {"note": "kept", "numbers": (1, 2.5), "nested": {"deep": [True, None]}}


@check(of_adapter=True)
def hook_entries_restored(bench: Bench) -> None:
    """`on_load_checkpoint` gets the entry that `on_save_checkpoint` added, on every rank."""
    task = replace(TASK, model=Noting)
    for rank, seen in enumerate(bench.run(_noted, task, path_in(bench))):
        expect(seen == _ENTRY, f"rank {rank}: the hook saved {_ENTRY} and got {seen}.")


@check(of_adapter=True)
def save_hook_sees_the_weights(bench: Bench) -> None:
    """`on_save_checkpoint` sees the state dict under the model's own names, and may leave out entries."""
    task = replace(TASK, model=Selective)
    names = set(bench.alone(_names, task))
    for rank, (seen, head) in enumerate(bench.run(_left_out, task, path_in(bench))):
        where = f"rank {rank}"
        expect(set(seen) == names, f"{where}: the hook saw {sorted(seen)}, the model has {sorted(names)}.")
        wanted = {"head.weight": task.module().head.weight.detach() * 0 + 0.5}
        expect_exactly(head, wanted, where=f"{where}, filled in by on_load_checkpoint")


@check(of_adapter=True)
def load_hook_renames(bench: Bench) -> None:
    """`on_load_checkpoint` sees the complete weights and may rename them."""
    alone: Record = bench.alone(run, TASK)
    ranks = bench.run(_renamed, TASK, replace(TASK, model=Renamed), path_in(bench))
    for rank, (shape, resumed) in enumerate(ranks):
        where = f"renamed while loading, rank {rank}"
        wanted = tuple(alone.weights["embed.weight"].shape)
        expect(shape == wanted, f"{where}: the hook saw embed.weight of shape {shape}, it has {wanted}.")
        losses = alone.losses[SAVED_AFTER:]
        expect_equal_losses(resumed.losses, losses, tolerance=TOLERANCE, where=where)


@check(of_adapter=True)
def callback_state_restored(bench: Bench) -> None:
    """The state of callbacks is restored, and their hooks run on every rank."""
    for rank, (counted, entry) in enumerate(bench.run(_counted, TASK, path_in(bench))):
        expect(
            counted == TASK.steps,
            f"rank {rank}: a callback that counts batches has {counted} after a run of {TASK.steps} that "
            f"was resumed after {SAVED_AFTER}.",
        )
        expect(entry == SAVED_AFTER, f"rank {rank}: a callback's hook saved {SAVED_AFTER} and got {entry}.")


class Noting(Resumable):
    """Adds an entry of its own to checkpoints."""

    got: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["entry"] = _ENTRY

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.got = checkpoint.get("entry")


class Selective(Resumable):
    """Leaves its last weight out of checkpoints, and sets another one when loading."""

    seen_names: Sequence[str] = ()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen_names = list(checkpoint["state_dict"])
        del checkpoint["state_dict"]["head.weight"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        value = Resumable(self.task).head.weight.detach() * 0 + 0.5
        checkpoint["state_dict"]["head.weight"] = value


class Renamed(Resumable):
    """The same layers, with a new name for the first one; a hook translates older checkpoints."""

    shape_seen: tuple[int, ...] = ()

    def build(self) -> None:
        """Create the layers in the same order, because numbered optimizer state depends on it."""
        super().build()
        layers = dict(self.named_children())
        for name in layers:
            delattr(self, name)
        for name, layer in layers.items():
            setattr(self, "stem" if name == "embed" else name, layer)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.get_submodule("stem")(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rename the weights, and the optimizer state if it is stored by name."""
        weights = checkpoint["state_dict"]
        self.shape_seen = tuple(weights["embed.weight"].shape)
        for name in [name for name in weights if name.startswith("embed.")]:
            weights[_new_name(name)] = weights.pop(name)
        for state in checkpoint["optimizer_states"]:
            state["state"] = {_new_name(key): value for key, value in state["state"].items()}
            for group in state["param_groups"]:
                for key in ("params", "param_names"):
                    if key in group:
                        group[key] = [_new_name(name) for name in group[key]]


def _new_name(name: Any) -> Any:
    return name.replace("embed.", "stem.") if isinstance(name, str) else name


class Counting(Callback):
    """Has a state, and an entry of its own in checkpoints."""

    def __init__(self) -> None:
        self.batches = 0
        self.entry = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Count before anything is saved."""
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["of_counting"] = trainer.global_step

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.entry = checkpoint["of_counting"]


def _names(subject: Subject, task: Task) -> list[str]:
    return list(task.module().state_dict())


def _noted(subject: Subject, task: Task, path: str) -> Any:
    """Return the entry that a resumed module's hook got."""
    run(subject, task, paths={SAVED_AFTER: path})
    module = Noting(task)
    run(subject, task, module=module, ckpt_path=path)
    return module.got


def _left_out(subject: Subject, task: Task, path: str) -> tuple[Sequence[str], dict[str, Tensor]]:
    """Return the entries that the hook saw, and the replacement of the entry that it left out."""
    module = Selective(task)
    run(subject, task, module=module, paths={SAVED_AFTER: path})
    resumed = run(subject, replace(task, seed=task.seed + 1), ckpt_path=path)
    return module.seen_names, {"head.weight": resumed.started.weights["head.weight"]}


def _renamed(subject: Subject, old: Task, new: Task, path: str) -> tuple[tuple[int, ...], Record]:
    run(subject, old, paths={SAVED_AFTER: path})
    module = Renamed(replace(new, seed=new.seed + 1))
    resumed = run(subject, new, module=module, ckpt_path=path)
    return module.shape_seen, resumed


def _counted(subject: Subject, task: Task, path: str) -> tuple[int, int]:
    """Return the count and the entry of a resumed run's callback."""
    run(subject, task, paths={SAVED_AFTER: path}, callbacks=[Counting()])
    counting = Counting()
    run(subject, task, callbacks=[counting], ckpt_path=path)
    return counting.batches, counting.entry
