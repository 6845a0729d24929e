"""Store an algorithm's state in checkpoints, under names that engines without the algorithm ignore.

The state is part of the optimizer's, beside that of parameters, because it is of no use without it::

    optim.<i>.state.comm.<kind>:<parameter>.own_<name>       [ranks, *shape]: a row of each rank (or node)
    optim.<i>.state.comm.<kind>:<parameter>.shared_<name>    equal on all ranks
    optim.<i>.state.comm.<kind>:.common_<name>               equal on all ranks, of no parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    link: tuple[int, int],
) -> None:
    """Add handles on an algorithm's state to an optimizer's.

    Args:
        state: The description of the optimizer; state of its parameters only is added.
        algorithm: The algorithm.
        own: The tensors of this rank alone, by parameter and name. Those of a sharded parameter are sharded
            as the parameter is.
        names: The names of the parameters.
        link: This rank among those that exchange, and their number.
    """
    prefix = _prefix(algorithm)
    of_optimizer = {name for group in state["param_groups"] for name in group["params"]}
    for kind, found in (("own", own), ("shared", algorithm.shared)):
        for parameter, tensors in found.items():
            if (name := names.get(parameter)) in of_optimizer:
                entries = state["state"].setdefault(f"{prefix}{name}", {})
                for key, tensor in tensors.items():
                    shard = _row(tensor, parameter, link) if kind == "own" else shard_of(tensor)
                    entries[f"{kind}_{key}"] = shard
    if algorithm.common:
        state["state"][prefix] = {f"common_{key}": shard_of(each) for key, each in algorithm.common.items()}


def load_state(
    saved: Mapping[str, Any],
    algorithm: Algorithm,
    names: Mapping[nn.Parameter, str],
    link: tuple[int, int],
) -> None:
    """Restore an algorithm's state from an optimizer's in a checkpoint; other ranks may have saved it.

    Args:
        saved: The optimizer's state by name, with unsharded tensors or handles on them.
        algorithm: The algorithm.
        names: The names of the parameters.
        link: This rank among those that exchange, and their number.
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
            elif parameter is not None and (of := shard_of(parameter)).boxes:
                rank, ranks = link
                combined = algorithm.combine(
                    name, partial(_read_row, value, of), saved=value.shape[0], rank=rank, ranks=ranks
                )
                if combined is not None:
                    algorithm.own.setdefault(parameter, {})[name] = combined.to(parameter.device)


def _prefix(algorithm: Algorithm) -> str:
    return f"comm.{algorithm.kind}:"


def _row(tensor: Tensor, parameter: nn.Parameter, link: tuple[int, int]) -> Shard:
    """Describe a tensor of this rank as its row of a tensor of all ranks that exchange."""
    of, (rank, ranks), shape = shard_of(parameter), link, tuple(tensor.shape)
    if not of.is_whole:
        shape = (*of.shape, *shape[len(of.shape) :])
    if not of.boxes:
        return Shard((ranks, *shape), tensor.dtype, (), ())
    box = _in_row(rank, of, shape)
    return Shard((ranks, *shape), tensor.dtype, (box,), (tensor.detach().unsqueeze(0),))


def _read(value: StoredName | Tensor) -> Tensor:
    return value.read() if isinstance(value, StoredName) else value.clone()


def _read_row(value: StoredName | Tensor, of: Shard, row: int) -> Tensor:
    """Read the elements of a parameter's shard from a rank's row."""
    box = _in_row(row, of, tuple(value.shape[1:]))
    read = value[box.slices].clone() if isinstance(value, Tensor) else value.read(box)
    return torch.squeeze(read, 0)


def _in_row(row: int, of: Shard, shape: tuple[int, ...]) -> Box:
    """Return the box of a parameter's shard in a row; the shape of a complete one may be another."""
    box = Box.whole(shape) if of.is_whole else of.boxes[0]
    rest = shape[len(box.size) :]  # of complex numbers as pairs
    return Box((row, *box.offset, *(0 for _ in rest)), (1, *box.size, *rest))
