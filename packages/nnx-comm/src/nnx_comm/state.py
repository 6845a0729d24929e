"""Store an algorithm's state in checkpoints, under names that engines without the algorithm ignore.

The state is part of the optimizer's, beside that of parameters, because it is of no use without it::

    optim.<i>.state.comm.<kind>:<parameter>.own_<name>       [ranks, *shape]: a row of each rank
    optim.<i>.state.comm.<kind>:<parameter>.shared_<name>    equal on all ranks
    optim.<i>.state.comm.<kind>:.common_<name>               equal on all ranks, of no parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nnx_base.shard import Box, Shard, shard_of
from nnx_checkpoint.reading.naming import StoredName
from nnx_checkpoint.reading.state import OptimizerState
from nnx_comm.algorithm import Algorithm

__all__ = ["REPLICA", "add_state", "load_state"]

REPLICA = "replica_"
"""Begins the names of a replica's own weights and optimizer state."""


def add_state(
    state: OptimizerState,
    algorithm: Algorithm,
    own: Mapping[nn.Parameter, Mapping[str, Tensor]],
    names: Mapping[nn.Parameter, str],
    *,
    rank: int,
    ranks: int,
) -> None:
    """Add handles on an algorithm's state to an optimizer's.

    Args:
        state: The description of the optimizer; state of its parameters only is added.
        algorithm: The algorithm.
        own: The tensors of this rank alone, by parameter and name.
        names: The names of the parameters.
        rank: This rank.
        ranks: The number of ranks.
    """
    prefix = _prefix(algorithm)
    of_optimizer = {name for group in state["param_groups"] for name in group["params"]}
    kinds: tuple[tuple[str, Mapping[nn.Parameter, Mapping[str, Tensor]], Callable[[Tensor], Shard]], ...] = (
        ("own", own, lambda tensor: _row(tensor, rank, ranks)),
        ("shared", algorithm.shared, shard_of),
    )
    for kind, found, describe in kinds:
        for parameter, tensors in found.items():
            if (name := names.get(parameter)) in of_optimizer:
                entries = state["state"].setdefault(f"{prefix}{name}", {})
                entries.update({f"{kind}_{key}": describe(tensor) for key, tensor in tensors.items()})
    if algorithm.common:
        state["state"][prefix] = {f"common_{key}": shard_of(each) for key, each in algorithm.common.items()}


def load_state(
    saved: Mapping[str, Any],
    algorithm: Algorithm,
    names: Mapping[nn.Parameter, str],
    *,
    rank: int,
    ranks: int,
) -> None:
    """Restore an algorithm's state from an optimizer's in a checkpoint; other ranks may have saved it.

    Args:
        saved: The optimizer's state by name, with unsharded tensors or handles on them.
        algorithm: The algorithm.
        names: The names of the parameters.
        rank: This rank.
        ranks: The number of ranks.
    """
    prefix = _prefix(algorithm)
    parameters = {f"{prefix}{name}": parameter for parameter, name in names.items()}
    for key, values in saved["state"].items():
        if not (isinstance(key, str) and key.startswith(prefix)):
            continue
        parameter = parameters.get(key)
        for entry, value in values.items():
            kind, _, name = entry.partition("_")
            if key == prefix:
                algorithm.common[name] = _read(value)
            elif parameter is not None and kind == "shared":
                algorithm.shared.setdefault(parameter, {})[name] = _read(value).to(parameter.device)
            elif parameter is not None:
                combined = algorithm.combine(
                    name,
                    lambda row, value=value: _read_row(value, row),  # type: ignore[misc]
                    saved=value.shape[0],
                    rank=rank,
                    ranks=ranks,
                )
                if combined is not None:
                    algorithm.own.setdefault(parameter, {})[name] = combined.to(parameter.device)


def _prefix(algorithm: Algorithm) -> str:
    return f"comm.{algorithm.kind}:"


def _row(tensor: Tensor, rank: int, ranks: int) -> Shard:
    tensor = tensor.detach()
    size = (1, *tensor.shape)
    box = Box((rank, *(0 for _ in tensor.shape)), size)
    return Shard((ranks, *tensor.shape), tensor.dtype, (box,), (tensor.view(size),))


def _read(value: StoredName | Tensor) -> Tensor:
    return value.read() if isinstance(value, StoredName) else value.clone()


def _read_row(value: StoredName | Tensor, row: int) -> Tensor:
    if isinstance(value, Tensor):
        return value[row].clone()
    box = Box((row, *(0 for _ in value.shape[1:])), (1, *value.shape[1:]))
    return torch.squeeze(value.read(box), 0)
