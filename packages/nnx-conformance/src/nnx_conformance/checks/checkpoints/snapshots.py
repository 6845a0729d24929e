"""The exact training state of a run at one moment, complete and by name, whatever engine holds it.

It is looked at through what the strategy itself hands out for saving, so that engines whose parameters are
local shards or flat buffers can be compared with one process. Runs in the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nnx_checkpoint.collective import all_gather_object, control_group
from nnx_checkpoint.shard import Shard, shard_of
from nnx_conformance.check import CheckFailed, expect, expect_equal_weights


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint has to bring back, the same on every rank if all is well.

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
    """Look at the training state. Collective."""
    module, strategy = trainer.lightning_module, trainer.strategy
    tensors = {("", name): value for name, value in strategy.lightning_module_state_dict().items()}
    groups = []
    for index, optimizer in enumerate(strategy.optimizers):
        state = _by_name(module, optimizer, strategy.optimizer_state(optimizer))
        groups.append(state["param_groups"])
        for parameter, entries in state["state"].items():
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
    """The state dicts agree exactly."""
    expect_exactly(seen.weights, expected.weights, where=where)


def expect_same_optimizers(seen: Snapshot, expected: Snapshot, *, where: str, tolerance: float = 0.0) -> None:
    """The tensors of the optimizers' state agree, exactly unless a tolerance is given."""
    where = f"{where}, state of the optimizers"
    expect_exactly(seen.optimizers, expected.optimizers, where=where, tolerance=tolerance)


def expect_exactly(
    seen: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, where: str, tolerance: float = 0.0
) -> None:
    """Tensors are those that were saved, to the bit unless a tolerance is given; the worst one is named."""
    expect_equal_weights(seen, saved, tolerance=tolerance, where=where, source="what was saved")


def expect_same_groups(seen: Snapshot, expected: Snapshot, *, where: str) -> None:
    """Param groups agree in number, in members and in every hyperparameter."""
    for index, (groups, wanted) in enumerate(zip(seen.groups, expected.groups, strict=True)):
        place = f"{where}, optimizer {index}"
        expect(len(groups) == len(wanted), f"{place}: {len(groups)} param groups instead of {len(wanted)}.")
        for number, (group, theirs) in enumerate(zip(groups, wanted, strict=True)):
            differing = {key for key in group.keys() | theirs.keys() if group.get(key) != theirs.get(key)}
            if differing:
                key = min(differing)
                raise CheckFailed(
                    f"{place}: {key} of param group {number} is {group.get(key)!r}, "
                    f"expected {theirs.get(key)!r}."
                )


def _by_name(module: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with names where torch numbers the parameters."""
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
    """Counters are plain numbers in some optimizers."""
    return torch.tensor(value) if isinstance(value, (int, float)) else value


def _gather(tensors: Mapping[tuple[str, str], Tensor | Shard]) -> dict[tuple[str, str], Tensor]:
    """Every tensor whole, on every rank, in one collective."""
    shards = {
        key: value if isinstance(value, Shard) else shard_of(value)
        for key, value in tensors.items()
        if isinstance(value, (Shard, DTensor))
    }
    mine = {
        key: [(box, view.detach().cpu()) for box, view in zip(shard.boxes, shard.data, strict=True)]
        for key, shard in shards.items()
    }
    parts = all_gather_object(mine, control_group())
    complete: dict[tuple[str, str], Tensor] = {}
    for key, value in tensors.items():
        if key not in shards:
            assert isinstance(value, Tensor)
            complete[key] = value.detach().cpu().clone()
            continue
        whole = torch.empty(shards[key].shape, dtype=shards[key].dtype)
        for part in parts:
            for box, piece in part.get(key, ()):
                whole[box.slices] = piece
        complete[key] = whole
    return complete
