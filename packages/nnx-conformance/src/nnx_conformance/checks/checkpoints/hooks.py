"""Hooks of modules and callbacks around checkpoints: what they put in comes back, what they change counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from nnx_conformance.check import Bench, check, expect, expect_equal_losses
from nnx_conformance.checks.checkpoints.runs import (
    SAVED_AFTER,
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    run,
)
from nnx_conformance.checks.checkpoints.snapshots import expect_exactly
from nnx_conformance.checks.checkpoints.stored import path_in
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task

_ENTRY = {"note": "kept", "numbers": (1, 2.5), "nested": {"deep": [True, None]}}


@check(of_adapter=True)
def hook_entries_come_back(bench: Bench) -> None:
    """What `on_save_checkpoint` of the module adds, its `on_load_checkpoint` gets, on every rank."""
    task = replace(TASK, model=Noting)
    for rank, seen in enumerate(bench.run(_noted, task, path_in(bench))):
        expect(seen == _ENTRY, f"rank {rank}: the hook saved {_ENTRY} and got {seen}.")


@check(of_adapter=True)
def save_hook_sees_the_weights(bench: Bench) -> None:
    """`on_save_checkpoint` sees the state dict under the model's own names, and may leave entries out."""
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
def callback_state_comes_back(bench: Bench) -> None:
    """The state of callbacks comes back, and their hooks are called on every rank."""
    for rank, (counted, entry) in enumerate(bench.run(_counted, TASK, path_in(bench))):
        expect(
            counted == TASK.steps,
            f"rank {rank}: a callback that counts batches has {counted} after a run of {TASK.steps} that "
            f"was resumed after {SAVED_AFTER}.",
        )
        expect(entry == SAVED_AFTER, f"rank {rank}: a callback's hook saved {SAVED_AFTER} and got {entry}.")


# --- models and callbacks -------------------------------------------------------------------------


class Noting(Resumable):
    """Puts an entry of its own into checkpoints."""

    got: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add it."""
        checkpoint["entry"] = _ENTRY

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it."""
        self.got = checkpoint.get("entry")


class Selective(Resumable):
    """Leaves its last weight out of checkpoints, and fills in another when one is loaded."""

    seen_names: Sequence[str] = ()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave it out."""
        self.seen_names = list(checkpoint["state_dict"])
        del checkpoint["state_dict"]["head.weight"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Fill it in."""
        value = Resumable(self.task).head.weight.detach() * 0 + 0.5
        checkpoint["state_dict"]["head.weight"] = value


class Renamed(Resumable):
    """The same layers, the first under a new name; its hook translates older checkpoints."""

    shape_seen: tuple[int, ...] = ()

    def build(self) -> None:
        """Create the layers, in the same order: numbered optimizer state depends on it."""
        super().build()
        parts = dict(self.named_children())
        for name in parts:
            delattr(self, name)
        for name, part in parts.items():
            setattr(self, "stem" if name == "embed" else name, part)

    def forward(self, x: Tensor) -> Tensor:
        """As before."""
        hidden = self.get_submodule("stem")(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rename the weights, and the optimizer's state where it is kept by name."""
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
        """Count; before anything is saved."""
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.batches = state_dict["batches"]

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the entry."""
        checkpoint["of_counting"] = trainer.global_step

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the entry."""
        self.entry = checkpoint["of_counting"]


# --- jobs -----------------------------------------------------------------------------------------


def _names(subject: Subject, task: Task) -> list[str]:
    return list(task.module().state_dict())


def _noted(subject: Subject, task: Task, path: str) -> Any:
    """What the hook of a resumed module got."""
    run(subject, task, paths={SAVED_AFTER: path})
    module = Noting(task)
    run(subject, task, module=module, ckpt_path=path)
    return module.got


def _left_out(subject: Subject, task: Task, path: str) -> tuple[Sequence[str], dict[str, Tensor]]:
    """What the hook saw when saving, and what a resumed run began with in place of what it left out."""
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
    """What a callback of a resumed run has counted, and the entry that it got."""
    run(subject, task, paths={SAVED_AFTER: path}, callbacks=[Counting()])
    counting = Counting()
    run(subject, task, callbacks=[counting], ckpt_path=path)
    return counting.batches, counting.entry
