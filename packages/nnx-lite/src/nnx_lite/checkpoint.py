"""Decide where ``save`` stores content: objects and their state in the shared checkpoint, the rest in a file.

A module's tensors get the names of an attribute called like its key. So ``self.save({"model": self.model},
path)`` and a LightningModule with ``self.model`` write the same names. `nnx_core.lightning.fabric` and
`nnx_core.lightning.checkpoint` do the writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.ranks import control_group, together
from nnx_checkpoint.reading.naming import FABRIC_KEYS
from nnx_core.backend import Backend, NoOptions, ParallelContext, Sample
from nnx_core.errors import CheckpointError
from nnx_core.lightning.checkpoint import CheckpointIO, innermost_checkpoint_io
from nnx_core.lightning.fabric import FabricAdapter, StoredContent, objects_to_save, rename_parameters
from nnx_core.lightning.routing import unwrap_engine, unwrap_optimizer
from nnx_core.lightning.strategy_checkpoint import module_state_dict, save_lightning_checkpoint
from nnx_lite.copies import FABRIC_ROOT, fabric_module
from nnx_lite.state_dicts import ModuleState, OptimizerStateDict, holds_shards

_REPLICATED_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "DataParallelStrategy")
_RESERVED_KEYS = ("state_dict", "optimizer_states", "nnx_ranks", FABRIC_KEYS)
_RAW = ""
"""The key of a state dict that was saved alone, without a dict around it."""


class _Replicated(Backend[NoOptions]):
    """A backend that replicates the model, as ``ddp`` and a single device do."""

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}


class ReplicatedState:
    """The state of a Lightning strategy that replicates the model, as the shared checkpoint needs it.

    Args:
        strategy: The strategy, such as ``ddp``.
        modules: The modules that were set up.
    """

    root = FABRIC_ROOT

    def __init__(self, strategy: Any, modules: list[nn.Module]) -> None:
        self.backend = _Replicated(NoOptions())
        self.backend.context = ParallelContext(device=strategy.root_device)
        self.checkpoint_io = innermost_checkpoint_io(strategy.checkpoint_io) or CheckpointIO()
        self.name = type(strategy).__name__
        self.global_rank = strategy.global_rank
        self.world_size = strategy.world_size
        self.models = modules

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's tensors by name. Collective: every rank gets rank zero's buffers."""
        return module_state_dict(self.backend, module)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        """Return the optimizer's state by parameter name."""
        return self.backend.optimizer_state(self.owner_of(optimizer), optimizer)

    def owner_of(self, optimizer: Any) -> nn.Module:
        """Return the module, among those set up, that has an optimizer's parameters."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self.models:
            if held & {id(parameter) for parameter in module.parameters()}:
                return module
        raise CheckpointError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up.",
            remedy="Pass it to `self.setup` together with its model.",
        )


def state_of(strategy: Any, modules: list[nn.Module]) -> Any:
    """Return an object that describes the state under a strategy.

    None means that Lightning's own engine or plugin does the saving.

    Args:
        strategy: The strategy of Fabric.
        modules: The modules that were set up.
    """
    if isinstance(strategy, FabricAdapter):
        return strategy
    io = strategy._checkpoint_io
    is_default = io is None or type(io) is fabric_module("plugins.io").TorchCheckpointIO
    if type(strategy).__name__ in _REPLICATED_STRATEGIES and (is_default or innermost_checkpoint_io(io)):
        return ReplicatedState(strategy, modules)
    return None


@dataclass(slots=True)
class _Content:
    """Content sorted by kind, under the user's keys."""

    modules: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


def is_plain(target: Any, content: Any) -> bool:
    """Return True if a file can hold content: no module, no optimizer, and no shard of their state.

    Args:
        target: The result of `state_of`.
        content: The content without Fabric's wrappers.

    Raises:
        CheckpointError: The content cannot be stored.
    """
    found = _sort_content(content)
    if found.modules or found.optimizers:
        return False
    _refuse_local_shards(target, content)
    return True


def save_content(target: Any, content: Any, path: Any) -> None:
    """Save content that holds modules, optimizers, or shards of their state. Collective.

    Args:
        target: The result of `state_of`.
        content: The content without Fabric's wrappers.
        path: The directory to write.

    Raises:
        CheckpointError: The content cannot be stored.
    """
    found = _sort_content(content)
    checkpoint, own = objects_to_save(found.rest)
    prefixes = {key: _prefix(key, value, len(found.modules)) for key, value in found.modules.items()}
    if found.modules:
        checkpoint["state_dict"] = {
            f"{prefixes[key]}{name}": value
            for key, module in found.modules.items()
            for name, value in _described_module(target, module).items()
        }
    if found.optimizers:
        checkpoint["optimizer_states"] = [
            _described_optimizer(target, optimizer, found.modules, prefixes)
            for optimizer in found.optimizers.values()
        ]
    added = {key: value for key, value in _trainer_keys().items() if key not in checkpoint}
    checkpoint |= added
    checkpoint[FABRIC_KEYS] = {
        "modules": list(found.modules),
        "optimizers": list(found.optimizers),
        "prefixes": prefixes,
        "added": list(added),
    }
    save_lightning_checkpoint(target, checkpoint, path, None, own=own)


def _trainer_keys() -> dict[str, Any]:
    """Return keys that Trainer requires under Lightning's strategies. Lite and Fabric drop them in a load."""
    return {"pytorch-lightning_version": fabric_module().__version__, "lr_schedulers": []}


def _sort_content(content: Any) -> _Content:
    if isinstance(content, ModuleState) or (_is_state_dict(content) and holds_shards(content)):
        return _Content(modules={_RAW: content})
    found = _Content()
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, (nn.Module, ModuleState)):
            found.modules[key] = value
        elif isinstance(value, (Optimizer, OptimizerStateDict)):
            found.optimizers[key] = value
        elif not holds_shards(value):
            found.rest[key] = value
        elif _is_state_dict(value):
            found.modules[key] = value
        elif isinstance(value, Mapping) and {"state", "param_groups"} <= {*value}:
            found.optimizers[key] = value
        else:
            raise CheckpointError(
                f"content[{key!r}] holds sharded tensors and is not a state dict.",
                remedy="Save the model, the optimizer, or their `state_dict()`, each under its own key.",
            )
    taken = sorted(str(key) for key in found.rest if key in _RESERVED_KEYS)
    if taken and (found.modules or found.optimizers):
        raise CheckpointError(
            f"content[{taken[0]!r}]: the shared checkpoint uses this key for its own data.",
            remedy="Choose another key.",
        )
    return found


def _is_state_dict(value: Any) -> bool:
    """Return True if a value is a flat mapping of names to tensors."""
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _prefix(key: str, module: Any, count: int) -> str:
    """Return the prefix of a module's names: its key, or nothing for a single LightningModule.

    Trainer loads such a module without a prefix.
    """
    owner = module.owner() if isinstance(module, ModuleState) and module.owner else module
    is_lightning_module = hasattr(owner, "_fabric")
    return "" if key in (_RAW, "state_dict") or (is_lightning_module and count == 1) else f"{key}."


def _described_module(target: Any, module: Any) -> Mapping[str, Any]:
    if isinstance(module, ModuleState):
        owner = module.owner() if module.owner else None
        if owner is not None:
            target.backend.sync_buffers(owner)
        with together(control_group(), doing="describing a state dict"):
            return module.described()
    if isinstance(module, Mapping):
        return module
    user = unwrap_engine(module)
    if any(user is each for each in target.models):
        described: Mapping[str, Any] = target.get_module_state_dict(user)
        return described
    return user.state_dict()


def _described_optimizer(
    target: Any, optimizer: Any, modules: Mapping[str, Any], prefixes: Mapping[str, str]
) -> Any:
    if isinstance(optimizer, Optimizer):
        raw = unwrap_optimizer(optimizer)
        state, owner = target.get_optimizer_state(raw), target.owner_of(raw)
    else:
        state = optimizer
        owner = optimizer.owner() if isinstance(optimizer, OptimizerStateDict) and optimizer.owner else None
    prefix = next((prefixes[key] for key, module in modules.items() if _belongs_to(module, owner)), None)
    if prefix is None:
        prefix = next(iter(prefixes.values())) if len(prefixes) == 1 and owner is None else ""
    return rename_parameters(state, lambda name: f"{prefix}{name}") if prefix else state


def _belongs_to(module: Any, owner: Any) -> bool:
    if isinstance(module, ModuleState):
        module = module.owner() if module.owner else None
    return owner is not None and isinstance(module, nn.Module) and unwrap_engine(module) is owner


def _refuse_local_shards(target: Any, content: Any) -> None:
    """Refuse a copied state dict with plain tensors that are shards, which a file would present as full.

    Raises:
        CheckpointError: A tensor is a shard. The error names the first one.
    """
    shards: dict[str, list[Any]] = {}
    for module in target.models if isinstance(target, FabricAdapter) else ():
        for name, shard in target.backend.model_state(module).tensors.items():
            shards.setdefault(name, []).append(shard)
    values = [content, *content.values()] if isinstance(content, Mapping) else []
    for mapping in values:
        for name, tensor in mapping.items() if isinstance(mapping, Mapping) else ():
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
            known = shards.get(name, [])
            is_shard = any(box.size == shape for shard in known for box in shard.boxes)
            if is_shard and not any(shard.shape == shape for shard in known):
                raise CheckpointError(
                    f"{name} of shape {shape} is this rank's shard of {known[0].shape}, with no offset.",
                    remedy="Save `model.state_dict()` unchanged, a `copy.deepcopy` of it, or the model.",
                )


def save_file(strategy: Any, content: Any, path: Any) -> None:
    """Write content on rank zero with ``torch.save``, or with the user's own checkpoint IO.

    No rank waits for another, because old scripts save under ``if self.is_global_zero``.
    """
    io = strategy._checkpoint_io
    if io is None or innermost_checkpoint_io(io) is not None:
        io = fabric_module("plugins.io").TorchCheckpointIO()
    if strategy.global_rank == 0:
        io.save_checkpoint(content, path)


def load_content(target: Any, path: Any, weights_only: bool | None) -> Any:
    """Read a checkpoint under the keys of its save; state dicts stay on disk until they are used. Collective.

    Args:
        target: The result of `state_of`.
        path: A path of any known format: a directory, a file or a URL.
        weights_only: False to run code in the file, which its author may have put there.
    """
    source = StoredContent(target, path, weights_only)
    if not (source.keys["modules"] or source.keys["optimizers"]):
        return source.everything()
    if source.keys["modules"] == [_RAW]:
        return source.model(_RAW)
    content = dict(source.rest)
    for key in source.keys["modules"]:
        content[key] = source.model(key)
    for index, key in enumerate(source.keys["optimizers"]):
        content[key] = _with_module_names(source, index)
    return content


def _with_module_names(source: StoredContent, index: int) -> Any:
    """Return an optimizer's state with the parameter names of its module."""
    assert source.optimizers is not None
    state = source.optimizers[index]
    names = [name for group in state["param_groups"] for name in group["params"]]
    prefixes = [prefix for prefix in map(source.prefix, source.keys["modules"]) if prefix]
    prefix = next((p for p in prefixes if all(str(name).startswith(p) for name in names)), "")
    return rename_parameters(state, lambda name: name.removeprefix(prefix)) if prefix else state
