"""Optimizer state of whole parameters that one rank each has: described alike, loaded by owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from nnx_checkpoint.collective import all_gather_object, control_group
from nnx_checkpoint.naming import StoredName
from nnx_checkpoint.shard import Shard
from nnx_core.restore import fill_optimizer_tensors, restore_groups
from nnx_core.state import OptimizerState, describe_optimizer, parameter_names
from nnx_fairscale.ownership import Ownership

if TYPE_CHECKING:
    from nnx_core.backend import Backend

__all__ = ["describe_owned", "load_owned"]


def describe_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    """Handles on this rank's optimizer state, and empty ones where it is another rank's. Collective.

    What the tensors are, and values that are no tensors, is told by the owner, so that all ranks describe the
    same names in the same order.
    """
    described = _describe_here(backend, module, ownership)
    names = parameter_names(module)
    mine = {
        name: {key: _tell(value) for key, value in entries.items()}
        for name, entries in described["state"].items()
    }
    told = all_gather_object(mine, control_group())
    state: dict[str, dict[str, Any]] = {}
    for parameter in ownership.parameters():
        name = names[parameter]
        entries = told[ownership.owner(parameter) if len(told) > 1 else 0].get(name)
        if entries is None:
            continue
        here = described["state"].get(name, {}) if ownership.owns(parameter) else {}
        state[name] = {key: here.get(key, _elsewhere(value)) for key, value in entries.items()}
    described["state"] = state
    return described


def _describe_here(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    described = describe_optimizer(module, ownership.optimizer, backend.shard)
    names = {name: parameter for parameter, name in parameter_names(module).items()}
    described["state"] = {
        name: entries for name, entries in described["state"].items() if ownership.owns(names[name])
    }
    return described


def _tell(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Shard) else [value]


def _elsewhere(told: Any) -> Any:
    return Shard(told[0], told[1], (), ()) if isinstance(told, tuple) else told[0]


def load_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership, saved: OptimizerState) -> None:
    """Restore what this rank owns of an optimizer, in place. It does not communicate."""
    names = parameter_names(module)
    optimizer = ownership.optimizer
    restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = saved["state"].get(names[parameter])
            if entries and ownership.owns(parameter):
                optimizer.state[parameter] = _allocate(backend, parameter, entries, group, optimizer)
    fill_optimizer_tensors(_describe_here(backend, module, ownership), saved)


def _allocate(
    backend: Backend[Any],
    parameter: nn.Parameter,
    entries: Mapping[str, Any],
    group: Mapping[str, Any],
    optimizer: Optimizer,
) -> dict[str, Any]:
    state = {}
    for name, value in entries.items():
        shape = getattr(value, "shape", None)
        if shape is None:
            state[name] = value
            continue
        dtype = value.dtype
        if isinstance(value, StoredName) and name != "step" and value.parameter_dtype == dtype:
            dtype = parameter.dtype
        state[name] = backend.new_optimizer_state(
            parameter, name, shape=tuple(shape), dtype=dtype, group=group
        )
    return state
