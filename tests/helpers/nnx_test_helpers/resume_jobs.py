"""One cell of the resume matrix: save in one run, resume in another, and report exact values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from nnx_base.ranks import all_gather_object, control_group
from nnx_base.shard import Shard, shard_of
from nnx_test_helpers.training import MODELS, Run, digest_of, make_trainer


@dataclass
class Seen:
    """The training state of a run at the time of saving or resuming, and the later losses."""

    weights: str
    optimizer: str
    losses: list[float]


class Snapshot(Callback):
    """Hashes weights and optimizer state when the run has come to a given step."""

    def __init__(self, step: int, save: str | None) -> None:
        self.step, self.save, self.seen = step, save, ("", "")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_step == self.step and self.save is None:
            self.seen = exact_state(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and self.save is not None:
            trainer.save_checkpoint(self.save)
            self.seen = exact_state(trainer, module)


def exact_state(trainer: Trainer, module: LightningModule) -> tuple[str, str]:
    """Hashes of all weights and of all optimizer state, complete, by name; collective."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    weights = {name: _shard_or_whole(value) for name, value in module.state_dict().items()}
    backend = getattr(trainer.strategy, "backend", None)
    state: dict[str, Shard | torch.Tensor] = {}
    for index, optimizer in enumerate(trainer.optimizers):
        if backend is None:
            held = {names[p]: entries for p, entries in optimizer.state.items() if p in names}
        else:
            described = backend.optimizer_state(module, optimizer)["state"]
            held = {name: entries for name, entries in described.items() if name in names.values()}
        for name, entries in held.items():
            for key, value in entries.items():
                state[f"{index}.{name}.{key}"] = value if isinstance(value, Shard) else _shard_or_whole(value)
        for number, group in enumerate(optimizer.param_groups):
            for key in ("lr", "weight_decay", "betas", "momentum"):
                if key in group:
                    state[f"{index}.group{number}.{key}"] = torch.tensor(group[key], dtype=torch.float64)
    complete = gather_all({"weights": weights, "state": state})
    return digest_of(complete["weights"]), digest_of(complete["state"])


def _shard_or_whole(value: torch.Tensor) -> Shard | torch.Tensor:
    return shard_of(value) if isinstance(value, DTensor) else value


def gather_all(tensors: dict[str, dict[str, Shard | torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor complete on every rank, in one collective: many small ones take most of a cell's time.

    Pieces travel as arrays of bytes, because a tensor takes ten times as long to unpickle.
    """
    mine = {
        (kind, name): (value.boxes, [_raw(piece) for piece in value.data])
        for kind, values in tensors.items()
        for name, value in values.items()
        if isinstance(value, Shard)
    }
    parts = all_gather_object(mine, control_group())
    complete: dict[str, dict[str, Any]] = {kind: dict(values) for kind, values in tensors.items()}
    for kind, name in mine:
        shard = tensors[kind][name]
        full = torch.empty(tuple(shard.shape), dtype=shard.dtype)
        for part in parts:
            for box, piece in zip(*part[kind, name], strict=True):
                place = full[box.slices]
                place.copy_(torch.from_numpy(piece).view(full.dtype).view(place.shape))
        complete[kind][name] = full
    return complete


def _raw(piece: torch.Tensor) -> Any:
    return piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def run_cell(run: Run, step: int) -> Seen:
    """Train a run that saves at `step`, or one that resumes from a checkpoint of that step."""
    import nnx

    module = MODELS[run.model](run)
    snapshot = Snapshot(step, run.save)
    plugins = [nnx.CheckpointIO()] if run.strategy.startswith(("ddp", "auto")) else None
    own: dict[str, Any] = {}
    if run.strategy.startswith("torchft"):  # it marks the end of a run there
        own["default_root_dir"] = Path(run.save or run.resume or "").parent
    trainer = make_trainer(run, callbacks=[snapshot], plugins=plugins, **own)
    trainer.fit(module, ckpt_path=run.resume)
    return Seen(*snapshot.seen, module.losses)
