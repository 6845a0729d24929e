"""Training state described as shards under parameter names, which is what every checkpoint holds, and filled.

A `State` is handles on this rank's tensors: describing it copies nothing, and nothing here communicates. What
saves and fills it is `nnx_core.lightning.checkpoint`; `nnx_core.backend.Backend` produces it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base._torch_compat import local_mode
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.reading.naming import LazyStateDict, OptimizerState, StoredName
from nnx_checkpoint.reading.reader import Checkpoint

__all__ = [
    "ModelState",
    "OptimizerState",
    "State",
    "describe_model",
    "describe_optimizer",
    "differences",
    "entries_of",
    "fill_model",
    "fill_optimizer",
    "fill_optimizer_tensors",
    "is_extra_state",
    "new_state_tensor",
    "parameter_names",
    "repoint_optimizer",
    "restore_groups",
]

log = logging.getLogger("nnx.checkpoint")


class ShardOf(Protocol):
    """`Backend.shard`: where a tensor lies in its logical tensor."""

    def __call__(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Describe `tensor`; for optimizer state, `parameter` is what it belongs to."""
        ...


@dataclass(slots=True)
class ModelState:
    """Parameters and persistent buffers of a module.

    Attributes:
        tensors: This rank's shard of every logical tensor, by fully qualified name.
        aliases: Maps every further name of tied tensors to the name that it is stored under.
        extra: Values of ``get_extra_state`` hooks, by name, and other values that are no tensors.
        copies: Names of those entries that are neither a parameter nor a buffer, nor share memory with one.
            Writing into them changes nothing: the module has to load them.
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
        shard_of: Maps a tensor as the engine holds it to its shard.
        entries: The result of `entries_of`, where the module's own code must run elsewhere than `shard_of`.
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
            state.tensors[name] = replace(shard_of(value), is_copy=name in state.copies)
    return state


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what `get_extra_state` of a module gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether writing into a tensor writes into one of the others."""
    address = _address(tensor)
    return address != 0 and any(_address(other) == address for other in others)


def _address(tensor: Tensor) -> int:
    """Where the storage begins of what this rank has of a tensor; 0 for none."""
    with local_mode():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return 0 if local.is_meta else local.untyped_storage().data_ptr()


def as_state_dict(state: ModelState) -> dict[str, Any]:
    """A described module in the form of a ``state_dict``, handles in place of tensors."""
    tied = {alias: state.tensors[name] for alias, name in state.aliases.items()}
    return {**state.tensors, **tied, **state.extra}


def entries_of(module: nn.Module) -> dict[str, Any]:
    """The module's ``state_dict``: its own parameters and buffers, and what its own code adds.

    A `state_dict` that copies parameters finds no gradients to copy. Collective where the module's code looks
    at sharded weights, which it sees unsharded.
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
    """The stored name of every parameter: of tied parameters, the first."""
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
        parameter: The parameter as this rank holds it.
        name: Name of the state tensor.
        shape: Logical shape wanted.
        like_parameter: True if that is the parameter's own, so that it is laid out alike.
        dtype: Dtype wanted.
        group: The param group of the parameter.
    """
    if name == "step" and shape == () and not (group.get("fused") or group.get("capturable")):
        # Step counters stay on the host unless the kernels read them on the device.
        return torch.zeros((), dtype=dtype)
    with local_mode():  # like what this rank holds of the parameter, not the whole
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
    """Make an optimizer that was built earlier hold the parameters that took the old ones' place.

    Its param group dicts stay the same objects, so schedulers and callbacks keep working.
    """
    if not replaced:
        return
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old in [cast("nn.Parameter", key) for key in optimizer.state if key in replaced]:
        optimizer.state[replaced[old]] = optimizer.state.pop(old)


# --- filling --------------------------------------------------------------------------------------
# In place, by name, casting nothing silently. Each rank reads what it holds; `nnx_core.lightning.checkpoint`
# makes a failure on one rank fail on all.


OTHER_MODEL = (
    "Build the model as it was when it was saved, rename keys in `on_load_checkpoint`, or set "
    "`strict_loading=False` on the LightningModule to load only the names that match."
)


def fill_model(
    module: nn.Module,
    state: ModelState,
    source: Mapping[str, Any],
    *,
    strict: bool,
    remedy: str = OTHER_MODEL,
) -> None:
    """Fill a module's shards in place from a state dict, lazy or complete.

    Args:
        module: The module whose extra state is set.
        state: This rank's handles, from `Backend.model_state`.
        source: A `LazyStateDict` or a mapping of complete tensors.
        strict: Refuse missing and unexpected names; shapes must match either way.
        remedy: What to do where names or shapes differ.

    Raises:
        CheckpointError: With every missing and unexpected name and every shape that differs.
    """
    missing, unexpected, shapes = differences(state, source)
    if shapes or (strict and (missing or unexpected)):
        raise _another_model(missing, unexpected, shapes, remedy)
    lazy: dict[str, Shard] = {}
    for name, found in _found_names(state, source):
        if found is None:
            continue
        shard = state.tensors[name]
        key = source.untouched(found) if isinstance(source, LazyStateDict) else None
        if key is None:
            shard.fill_from(source[found])
        else:
            lazy[key] = shard
    if isinstance(source, LazyStateDict):
        _fill_casting(source.stored, lazy)
    for name in state.extra:
        if name in source:
            prefix = name.removesuffix("_extra_state").removesuffix(".")
            module.get_submodule(prefix).set_extra_state(source[name])


def _found_names(state: ModelState, source: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Every tensor's name, and under which of its names (of tied tensors) the source has it."""
    names = {name: [name] for name in state.tensors}
    for alias, stored in state.aliases.items():
        names.setdefault(stored, []).append(alias)
    return [(name, next((each for each in names[name] if each in source), None)) for name in state.tensors]


def differences(state: ModelState, source: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Names that are missing in the source, names that it alone has, and shapes that differ."""
    found_names = _found_names(state, source)
    missing = [name for name, found in found_names if found is None]
    missing += [name for name in state.extra if name not in source]
    known = {*state.tensors, *state.aliases, *state.extra}
    unexpected = [name for name in source if name not in known]
    shapes = []
    for name, found in found_names:
        if found is None:
            continue
        shape = state.tensors[name].shape
        stored = source.shape(found) if isinstance(source, LazyStateDict) else tuple(source[found].shape)
        if stored != shape:
            shapes.append(f"{name} is {stored} in the checkpoint and {shape} in the model")
    return missing, unexpected, shapes


def _another_model(
    missing: list[str], unexpected: list[str], shapes: list[str], remedy: str
) -> CheckpointError:
    parts = [
        f"{title}: {_shorten(names)}"
        for title, names in (
            ("missing in the checkpoint", missing),
            ("unexpected in the checkpoint", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    return CheckpointError(
        f"the checkpoint is of another model; {'; '.join(parts)}.",
        remedy=remedy,
    )


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _fill_casting(stored: Checkpoint, shards: Mapping[str, Shard]) -> None:
    """Fill in place; tensors stored in another floating dtype are read and converted."""
    exact: dict[str, Shard] = {}
    cast: dict[str, Shard] = {}
    for key, shard in shards.items():
        same = stored.entry(key).dtype == shard.dtype
        (exact if same else cast)[key] = shard
    stored.fill(exact)
    if cast and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning(
            "Converting %d tensors that were saved in another dtype: %s", len(cast), _shorten([*cast])
        )
    for key, shard in cast.items():
        dtype = stored.entry(key).dtype
        if not (dtype.is_floating_point and shard.dtype.is_floating_point):
            raise CheckpointError(
                f"{key} is {dtype} in the checkpoint and {shard.dtype} in the model.",
                remedy="Convert it in `on_load_checkpoint`, or build the model with the saved dtype.",
            )
        for box, view in zip(shard.boxes, shard.data, strict=True):
            view.copy_(stored.read(key, box))


class AllocatesState(Protocol):
    """The part of `Backend` that allocates and describes an optimizer's state."""

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """See `Backend.optimizer_state`."""
        ...

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """See `Backend.new_optimizer_state`."""
        ...


def fill_optimizer(
    backend: AllocatesState, module: nn.Module, optimizer: Optimizer, saved: OptimizerState
) -> None:
    """Restore an optimizer in place, by parameter name, allocating what it does not have yet.

    Args:
        backend: Allocates and describes state tensors.
        module: Owner of the parameters.
        optimizer: The optimizer to restore.
        saved: Its state: values are `StoredName`, complete tensors, or other values.

    Raises:
        CheckpointError: The param groups differ from the saved ones.
    """
    names = parameter_names(module)
    restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in saved["state"].get(names[parameter], {}).items():
                optimizer.state[parameter][name] = _place(backend, parameter, name, value, group)
    fill_optimizer_tensors(backend.optimizer_state(module, optimizer), saved)


def _place(
    backend: AllocatesState, parameter: nn.Parameter, name: str, value: Any, group: Mapping[str, Any]
) -> Any:
    if not isinstance(value, (StoredName, Tensor)):
        return value
    return backend.new_optimizer_state(
        parameter, name, shape=tuple(value.shape), dtype=_state_dtype(parameter, name, value), group=group
    )


def _state_dtype(parameter: nn.Parameter, name: str, value: StoredName | Tensor) -> torch.dtype:
    """The dtype as saved, unless the parameter's has changed since and the state's was the same as its."""
    if not (value.dtype.is_floating_point and parameter.dtype.is_floating_point) or name == "step":
        return value.dtype
    if isinstance(value, Tensor):
        return parameter.dtype  # what `Optimizer.load_state_dict` does: nothing tells what it was
    saved = value.parameter_dtype
    return parameter.dtype if saved == value.dtype else value.dtype


def fill_optimizer_tensors(state: OptimizerState, saved: OptimizerState) -> None:
    """Fill state tensors that exist already.

    Args:
        state: This rank's handles, from `Backend.optimizer_state`.
        saved: The source of each, by the same names: a `StoredName` or a complete tensor.
    """
    lazy: dict[str, Shard] = {}
    source: Checkpoint | None = None
    for parameter, entries in state["state"].items():
        for name, shard in entries.items():
            value = saved["state"][parameter][name]
            if isinstance(value, StoredName):
                lazy[value.key] = shard
                source = value.stored
            elif isinstance(value, Tensor):
                shard.fill_from(value)
    if source is not None:
        _fill_casting(source, lazy)


def restore_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Give an optimizer's param groups the learning rates, and all else, that were saved.

    Args:
        optimizer: Whose groups are filled.
        names: The names of its parameters.
        saved: The groups of a checkpoint, with the names of their parameters under ``params``.

    Raises:
        CheckpointError: Their number or their parameters differ.
    """
    current = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if len(current) != len(saved):
        raise CheckpointError(
            f"{type(optimizer).__name__} has {len(current)} param groups and the checkpoint has "
            f"{len(saved)}.",
            remedy="Build the optimizer in `configure_optimizers` as it was when the checkpoint was saved.",
        )
    for index, (group, mine, theirs) in enumerate(zip(optimizer.param_groups, current, saved, strict=True)):
        differing = sorted(set(mine).symmetric_difference(theirs["params"]))
        if differing:
            raise CheckpointError(
                f"param group {index} of {type(optimizer).__name__} holds other parameters than in the "
                f"checkpoint; they differ in {_shorten(differing)}.",
                remedy="Group the parameters in `configure_optimizers` as they were when it was saved.",
            )
        group.update({key: value for key, value in theirs.items() if key != "params"})
