"""Runs that the checks of checkpoints share: save and resume a model with every kind of state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import nnx_checkpoint
from nnx_base.ranks import all_gather_object, control_group
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint import NativeCheckpoint
from nnx_conformance.check import Bench, CheckFailed, expect
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task, dataset, share_of
from nnx_conformance.training import make_trainer, outcome_of
from nnx_core.backend import Backend
from nnx_core.names.registry import StrategyRegistry

# A snapshot is complete and by name, whichever engine holds the state.
# It reads the state as the strategy exports it for saving, so that engines with local shards or flat
# buffers compare with one process.


@dataclass(frozen=True)
class Snapshot:
    """The state that a checkpoint must restore, equal on every rank.

    Attributes:
        weights: The complete state dict.
        optimizers: Every tensor of the optimizers' state, as ``"<optimizer>.<parameter>.<name>"``.
        groups: The param groups of each optimizer: hyperparameters, and names under ``params``.
        schedulers: State of each scheduler.
        counters: Steps and epochs.

    """

    weights: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    counters: dict[str, int]


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Return the training state. Collective."""
    module, strategy = trainer.lightning_module, trainer.strategy
    tensors = {("", name): value for name, value in strategy.lightning_module_state_dict().items()}
    groups = []
    for index, optimizer in enumerate(strategy.optimizers):
        state = _by_name(module, optimizer, strategy.optimizer_state(optimizer))
        groups.append(state["param_groups"])
        for parameter in dict.fromkeys(name for group in state["param_groups"] for name in group["params"]):
            entries = state["state"].get(parameter, {})  # an engine may keep state of its own beside it
            tensors |= {(f"{index}.{parameter}", key): _as_tensor(value) for key, value in entries.items()}
    complete = _gather({key: value for key, value in tensors.items() if isinstance(value, (Tensor, Shard))})
    return Snapshot(
        weights={name: value for (owner, name), value in complete.items() if not owner},
        optimizers={f"{owner}.{name}": value for (owner, name), value in complete.items() if owner},
        groups=groups,
        schedulers=[dict(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        counters={"global_step": trainer.global_step, "epoch": trainer.current_epoch},
    )


def expect_same_weights(seen: Snapshot, expected: Snapshot, *, where: str) -> None:
    """Expect exactly equal state dicts."""
    expect_exactly(seen.weights, expected.weights, where=where)


def expect_same_optimizers(seen: Snapshot, expected: Snapshot, *, where: str, tolerance: float = 0.0) -> None:
    """Expect equal tensors of optimizer state, exactly unless a tolerance is given."""
    where = f"{where}, state of the optimizers"
    expect_exactly(seen.optimizers, expected.optimizers, where=where, tolerance=tolerance)


def expect_exactly(
    seen: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, where: str, tolerance: float = 0.0
) -> None:
    """Expect the saved tensors, bitwise unless a tolerance is given; the error names the worst tensor."""
    expect_equal_weights(seen, saved, tolerance=tolerance, where=where, source="the checkpoint")


def expect_same_groups(seen: Snapshot, expected: Snapshot, *, where: str) -> None:
    """Expect param groups with equal number, members and hyperparameters."""
    for index, (groups, wanted) in enumerate(zip(seen.groups, expected.groups, strict=True)):
        place = f"{where}, optimizer {index}"
        expect(len(groups) == len(wanted), f"{place}: {len(groups)} param groups, expected {len(wanted)}.")
        for number, (group, theirs) in enumerate(zip(groups, wanted, strict=True)):
            differing = {key for key in group.keys() | theirs.keys() if group.get(key) != theirs.get(key)}
            if differing:
                key = min(differing)
                raise CheckFailed(
                    f"{place}: {key} of param group {number} is {group.get(key)!r}, "
                    f"expected {theirs.get(key)!r}."
                )


def _by_name(module: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with names in place of torch's parameter numbers."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [names.get(p, str(i)) for i, p in enumerate(_parameters(optimizer))]

    def name(key: Any) -> str:
        return order[key] if isinstance(key, int) else str(key)

    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [name(key) for key in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return {"state": {name(key): value for key, value in state["state"].items()}, "param_groups": groups}


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _as_tensor(value: Any) -> Any:
    """Convert plain numbers, which some optimizers use as counters."""
    return torch.tensor(value) if isinstance(value, (int, float)) else value


def _gather(tensors: Mapping[tuple[str, str], Tensor | Shard]) -> dict[tuple[str, str], Tensor]:
    """Gather every tensor on every rank, in one collective."""
    shards = {
        key: value if isinstance(value, Shard) else shard_of(value)
        for key, value in tensors.items()
        if isinstance(value, (Shard, DTensor))
    }
    local_shards = {
        key: [(box, view.detach().cpu()) for box, view in zip(shard.boxes, shard.data, strict=True)]
        for key, shard in shards.items()
    }
    shards_of_ranks = all_gather_object(local_shards, control_group())
    complete: dict[tuple[str, str], Tensor] = {}
    for key, value in tensors.items():
        if key not in shards:
            assert isinstance(value, Tensor)
            complete[key] = value.detach().cpu().clone()
            continue
        full = torch.empty(shards[key].shape, dtype=shards[key].dtype)
        for of_rank in shards_of_ranks:
            for box, local in of_rank.get(key, ()):
                full[box.slices] = local
        complete[key] = full
    return complete


# Backends write nnx checkpoints by themselves. Raw strategies and one plain process get
# `nnx.CheckpointIO` as a plugin, if they accept one.


SAVED_AFTER = 2
"""Steps after which the runs save by default."""


class Resumable(Plain):
    """Has every kind of state: weights, a buffer, an optimizer with moments, a scheduler.

    The module reads the batch of a step by itself, so that losses do not depend on the loader's position,
    which a separate check covers.

    """

    def build(self) -> None:
        super().build()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Train on the batch of this step, at any position of the loader."""
        self.seen += 1
        return super().training_step(self.batch_of_step(self.trainer.global_step), index)

    def batch_of_step(self, step: int) -> list[Tensor]:
        """Return this rank's share of a step's global batch."""
        share = share_of(self.trainer)
        size = GLOBAL_BATCH // share["num_replicas"]
        start = (step % self.task.batches) * GLOBAL_BATCH + share["rank"] * size
        return [tensor[start : start + size].to(self.device) for tensor in dataset(self.task).tensors]

    def configure_optimizers(self) -> Any:
        """Return one optimizer whose learning rate changes in every step."""
        optimizer = self.adam(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def adam(self, parameters: Any) -> torch.optim.AdamW:
        """Return AdamW with a large `eps`, so that rounding of tiny gradients stays small in the update."""
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, eps=1e-3)


TASK = Task(model=Resumable, steps=4)
TOLERANCE = 1e-5
"""Largest difference of losses and weights between runs at different world sizes."""


@dataclass
class Record:
    """The results of a run.

    Attributes:
        started: The state when training began.
        losses: Mean loss over all ranks of every batch.
        weights: The complete state dict after the run.

    """

    _saved: Snapshot | None
    started: Snapshot
    losses: list[float]
    weights: dict[str, Tensor]

    @property
    def saved(self) -> Snapshot:
        """The state at the last save.

        Raises:
            CheckFailed: The run ended before the step at which it should save.

        """
        if self._saved is None:
            raise CheckFailed(f"the run ended after {len(self.losses)} batches, before it saved.")
        return self._saved


class SaveAt(Callback):
    """Takes snapshots and saves after certain steps.

    Args:
        paths: The paths to save to, by step; an empty path only takes a snapshot.
        weights_only: Save the weights only.

    """

    def __init__(self, paths: Mapping[int, str], *, weights_only: bool = False) -> None:
        self.paths = paths
        self.weights_only = weights_only
        self.saved: Snapshot | None = None
        self.started: Snapshot | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = take_snapshot(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        path = self.paths.get(trainer.global_step)
        if path is not None:
            self.saved = take_snapshot(trainer)
        if path:
            trainer.save_checkpoint(path, weights_only=self.weights_only)


def trainer_for(subject: Subject, task: Task, *, in_background: bool = False, **settings: Any) -> Trainer:
    """Return a Trainer that writes nnx checkpoints, if the strategy allows it.

    Args:
        subject: The strategy.
        task: The training to run.
        in_background: Save in the background.
        **settings: Further arguments of Trainer.

    """
    import nnx_core

    if _writes_by_itself(subject):
        if in_background:
            subject = replace(subject, options={**subject.options, "async_save": True})
        return make_trainer(subject, task, **settings)
    return make_trainer(subject, task, plugins=[nnx_core.CheckpointIO(async_save=in_background)], **settings)


def _writes_by_itself(subject: Subject) -> bool:
    """Return True if the strategy is a `Backend`, whose checkpoints the core writes."""
    if subject.is_lightning:
        return False
    target = StrategyRegistry.get(subject.name).resolve()
    return isinstance(target, type) and issubclass(target, Backend)


def run(
    subject: Subject,
    task: Task,
    *,
    module: Plain | None = None,
    paths: Mapping[int, str] | None = None,
    ckpt_path: str | None = None,
    weights_only: bool = False,
    in_background: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Record:
    """Train, from the beginning or from a checkpoint.

    Args:
        subject: The strategy.
        task: The training to run.
        module: An existing module instead of a new one.
        paths: The paths to save to, by step; see `SaveAt`.
        ckpt_path: Checkpoint to resume from.
        weights_only: Save the weights only.
        in_background: Save in the background.
        callbacks: Further callbacks, which run before the saving one.

    """
    module = module if module is not None else task.module()
    saver = SaveAt(paths or {}, weights_only=weights_only)
    trainer = trainer_for(subject, task, callbacks=[*callbacks, saver], in_background=in_background)
    trainer.fit(module, ckpt_path=ckpt_path)
    if saver.started is None:
        raise CheckFailed("training ended without a call of `on_train_start`.")
    outcome = outcome_of(trainer, module)
    return Record(saver.saved, saver.started, outcome.losses, outcome.weights)


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of a call on this rank; empty if it succeeds."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def path_in(bench: Bench) -> str:
    """Return the path at which the strategy of a check saves."""
    return str(bench.directory / "saved.ckpt")


def saved_checkpoint(bench: Bench, *, weights_only: bool = False) -> tuple[NativeCheckpoint, Record]:
    """Return an open checkpoint of the strategy, and the run that saved it.

    Args:
        bench: The bench of the check.
        weights_only: Save the weights only.

    """
    saved: Record = bench.run(save, TASK, path_in(bench), weights_only)[0]
    return open_saved(bench), saved


def open_saved(bench: Bench) -> NativeCheckpoint:
    """Open the saved checkpoint.

    Raises:
        NotApplicable: The strategy saves by itself, in a format of its own.

    """
    stored = nnx_checkpoint.open_checkpoint(path_in(bench))
    if isinstance(stored, NativeCheckpoint):
        return stored
    bench.not_applicable(
        f"the strategy does not use nnx.CheckpointIO: its checkpoints have the format {stored.format!r}"
    )


def save(subject: Subject, task: Task, path: str, weights_only: bool = False) -> Record:
    """Train and save, as a job.

    Args:
        subject: The strategy.
        task: The training to run.
        path: The path to save to; if empty, only take a snapshot.
        weights_only: Save the weights only.

    """
    paths = {SAVED_AFTER: path}
    return run(subject, replace(task, steps=SAVED_AFTER), paths=paths, weights_only=weights_only)


def expect_resumed(bench: Bench, ranks: list[Record], saved: Record, what: str) -> None:
    """Expect bitwise equal state after resuming, and the losses and weights of an uninterrupted process.

    Args:
        bench: The tools of the check.
        ranks: The resumed runs, in rank order.
        saved: The run that saved.
        what: Describes the saving and resuming runs, for the message.

    """
    alone: Record = bench.alone(run, TASK)
    for rank, resumed in enumerate(ranks):
        where = f"{what}, rank {rank}"
        expect_same_weights(resumed.started, saved.saved, where=where)
        expect_same_optimizers(resumed.started, saved.saved, where=where)
        expect_same_groups(resumed.started, saved.saved, where=where)
        counters = resumed.started.counters
        expect(counters == saved.saved.counters, f"{where}: {counters}, saved was {saved.saved.counters}.")
        losses = alone.losses[SAVED_AFTER:]
        expect_equal_losses(resumed.losses, losses, tolerance=TOLERANCE, where=where)
        expect_equal_weights(resumed.weights, alone.weights, tolerance=TOLERANCE, where=where)


def resume(subject: Subject, task: Task, path: str) -> Record:
    """Resume from other initial weights, as a job.

    Args:
        subject: The strategy.
        task: The training to run.
        path: The checkpoint.

    """
    return run(subject, replace(task, seed=task.seed + 1), ckpt_path=path)
