"""Describe training state as shards under parameter names, the content of every checkpoint.

A `State` holds handles on this rank's tensors: describing it copies nothing, and nothing here communicates.
`nnx_core.backend.Backend` produces it; `nnx_core.lightning.checkpoint` saves and fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base._torch_compat import local_mode
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.reading.naming import OptimizerState

__all__ = [
    "ModelState",
    "OptimizerState",
    "State",
    "describe_model",
    "describe_optimizer",
    "entries_of",
    "is_extra_state",
    "new_state_tensor",
    "parameter_names",
    "repoint_optimizer",
]


class ShardOf(Protocol):
    """The type of `Backend.shard`: a function from a tensor to its shard of the logical tensor."""

    def __call__(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the shard of `tensor`; `parameter` is the owner of optimizer state."""
        ...


@dataclass(slots=True)
class ModelState:
    """Parameters and persistent buffers of a module.

    Attributes:
        tensors: This rank's shard of every logical tensor, by fully qualified name.
        aliases: Further names of tied tensors, each mapped to its stored name.
        extra: Values of ``get_extra_state`` hooks, by name, and other values that are no tensors.
        copies: Names of entries that share no memory with a parameter or buffer. Writing into them changes
            nothing: the module has to load them.
    """

    tensors: dict[str, Shard] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)


@dataclass(slots=True)
class State:
    """Model and optimizers of one rank."""

    model: ModelState
    optimizers: list[OptimizerState] = field(default_factory=list)


def describe_model(
    module: nn.Module, shard_of: ShardOf, entries: Mapping[str, Any] | None = None
) -> ModelState:
    """Describe a module's parameters and persistent buffers as its ``state_dict`` names them.

    Args:
        module: The module, laid out or not.
        shard_of: Function from the engine's tensor to its shard.
        entries: The result of `entries_of`, if the module's own code must run elsewhere than `shard_of`.
    """
    entries = entries_of(module) if entries is None else entries
    state = ModelState()
    stored: dict[int, str] = {}
    owned = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            state.extra[name] = value
            if not is_extra_state(name):
                state.copies.add(name)
        elif id(value) in stored:
            state.aliases[name] = stored[id(value)]
        else:
            if id(value) in owned:
                stored[id(value)] = name
            elif is_extra_state(name) or not _shares_memory(value, owned.values()):
                state.copies.add(name)
            shard = shard_of(value)
            state.tensors[name] = replace(shard, is_copy=True) if name in state.copies else shard
    return state


def is_extra_state(name: str) -> bool:
    """Return True if an entry of a state dict is the result of a module's `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state"


def _shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return True if writing into a tensor writes into one of the others."""
    address = _address(tensor)
    return address != 0 and any(_address(other) == address for other in others)


def _address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor's local shard; 0 if it has none."""
    with local_mode():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return 0 if local.is_meta else local.untyped_storage().data_ptr()


def as_state_dict(state: ModelState) -> dict[str, Any]:
    """Return a described module as a ``state_dict`` with handles for tensors."""
    tied = {alias: state.tensors[name] for alias, name in state.aliases.items()}
    return {**state.tensors, **tied, **state.extra}


def entries_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's ``state_dict``: its parameters and buffers, and entries of its own code.

    Gradients are hidden meanwhile, so that user code that copies parameters does not copy them. Collective if
    that code reads sharded weights: it sees them unsharded.
    """
    if type(module).state_dict is nn.Module.state_dict:
        return module.state_dict(keep_vars=True)
    with local_mode():
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
    try:
        return module.state_dict(keep_vars=True)
    finally:
        with local_mode():
            for parameter, gradient in gradients:
                parameter.grad = gradient


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the stored name of every parameter; for tied parameters, the first name."""
    return {parameter: name for name, parameter in module.named_parameters()}


def describe_optimizer(module: nn.Module, optimizer: Optimizer, shard_of: ShardOf) -> OptimizerState:
    """Describe an optimizer's state under the names of the module's parameters.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not the module's.
    """
    names = parameter_names(module)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        params = [_name(names, parameter, optimizer, index) for parameter in group["params"]]
        groups.append({**hyper, "params": params})
    state = {}
    for key, values in optimizer.state.items():
        parameter = cast("nn.Parameter", key)
        state[names[parameter]] = {
            name: shard_of(value, parameter=parameter) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
    return OptimizerState(state=state, param_groups=groups)


def _name(
    names: Mapping[nn.Parameter, str], parameter: nn.Parameter, optimizer: Optimizer, group: int
) -> str:
    if parameter in names:
        return names[parameter]
    raise CheckpointError(
        f"{type(optimizer).__name__} holds in param group {group} a parameter of shape "
        f"{tuple(parameter.shape)} that is not a parameter of the module: its state has no name.",
        remedy="Register it on the LightningModule, or build the optimizer from `self.parameters()`.",
    )


def new_state_tensor(
    parameter: nn.Parameter,
    name: str,
    *,
    shape: tuple[int, ...],
    like_parameter: bool,
    dtype: torch.dtype,
    group: Mapping[str, Any],
) -> Tensor:
    """Allocate a state tensor the way torch's optimizers do when they first step.

    Args:
        parameter: The local parameter.
        name: Name of the state tensor.
        shape: Logical shape of the state tensor.
        like_parameter: True if the shape is the parameter's own: the tensor is then sharded like it.
        dtype: Dtype of the state tensor.
        group: The param group of the parameter.
    """
    if name == "step" and shape == () and not (group.get("fused") or group.get("capturable")):
        # Step counters stay on the host unless the kernels read them on the device.
        return torch.zeros((), dtype=dtype)
    with local_mode():  # like the local shard, not the unsharded parameter
        return _new_like(parameter, shape=shape, like_parameter=like_parameter, dtype=dtype)


def _new_like(
    parameter: nn.Parameter, *, shape: tuple[int, ...], like_parameter: bool, dtype: torch.dtype
) -> Tensor:
    if like_parameter:
        return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.preserve_format)
    if shape:
        return parameter.detach().new_zeros(shape, dtype=dtype)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.zeros((), dtype=dtype, device=local.device)


def repoint_optimizer(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in an optimizer that was built before.

    Its param group dicts and their lists stay the same objects: schedulers and callbacks keep working, and so
    does an optimizer with another name for a list, as `LBFGS` has.
    """
    if not replaced:
        return
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old in [cast("nn.Parameter", key) for key in optimizer.state if key in replaced]:
        optimizer.state[replaced[old]] = optimizer.state.pop(old)
