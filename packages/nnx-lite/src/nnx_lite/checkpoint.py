"""``save`` and ``load``: objects and their state go to the shared checkpoint, anything else to a file.

A module is stored under the names that it has as an attribute called like its key, so that
``self.save({"model": self.model}, path)`` and a LightningModule with ``self.model`` write the same. This
module decides what is stored where; `nnx_core.lightning.fabric` and `nnx_core.lightning.checkpoint` do it.
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

_WHOLE_ON_EVERY_RANK = ("SingleDeviceStrategy", "DDPStrategy", "DataParallelStrategy")
_OF_LIGHTNING = ("state_dict", "optimizer_states", "nnx_ranks", FABRIC_KEYS)
_RAW = ""
"""Key of a state dict that was saved by itself."""


class _Replicated(Backend[NoOptions]):
    """How ``ddp`` and a single device hold a model: whole."""

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}


class WholeState:
    """What the shared checkpoint needs to know of a strategy of Lightning's that keeps the model whole.

    Args:
        strategy: Such as ``ddp``.
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
        """The module's tensors by name. Collective: every rank's buffers become rank 0's."""
        return module_state_dict(self.backend, module)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        """The optimizer's state by parameter name."""
        return self.backend.optimizer_state(self.owner_of(optimizer), optimizer)

    def owner_of(self, optimizer: Any) -> nn.Module:
        """The model that was set up whose parameters an optimizer holds."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self.models:
            if held & {id(parameter) for parameter in module.parameters()}:
                return module
        raise CheckpointError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up.",
            remedy="Pass it to `self.setup` together with its model.",
        )


def state_of(strategy: Any, modules: list[nn.Module]) -> Any:
    """What describes the state under a strategy; None where Lightning's own engine or plugin does the saving.

    Args:
        strategy: The strategy of Fabric.
        modules: The modules that were set up.
    """
    if isinstance(strategy, FabricAdapter):
        return strategy
    io = strategy._checkpoint_io
    is_default = io is None or type(io) is fabric_module("plugins.io").TorchCheckpointIO
    if type(strategy).__name__ in _WHOLE_ON_EVERY_RANK and (is_default or innermost_checkpoint_io(io)):
        return WholeState(strategy, modules)
    return None


@dataclass(slots=True)
class _Parts:
    """Content taken apart, by the user's keys."""

    modules: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


def is_plain(target: Any, content: Any) -> bool:
    """Whether content holds no module, no optimizer and no part of their state, so that a file will do.

    Args:
        target: The result of `state_of`.
        content: With Fabric's wrappers removed.

    Raises:
        CheckpointError: The content cannot be stored.
    """
    parts = _take_apart(content)
    if parts.modules or parts.optimizers:
        return False
    _refuse_parts_of_tensors(target, content)
    return True


def save_content(target: Any, content: Any, path: Any) -> None:
    """Save content that holds modules, optimizers, or parts of their state. Collective.

    Args:
        target: The result of `state_of`.
        content: With Fabric's wrappers removed.
        path: Directory to write.

    Raises:
        CheckpointError: The content cannot be stored.
    """
    parts = _take_apart(content)
    checkpoint, own = objects_to_save(parts.rest)
    prefixes = {key: _prefix(key, value, len(parts.modules)) for key, value in parts.modules.items()}
    if parts.modules:
        checkpoint["state_dict"] = {
            f"{prefixes[key]}{name}": value
            for key, module in parts.modules.items()
            for name, value in _described_module(target, module).items()
        }
    if parts.optimizers:
        checkpoint["optimizer_states"] = [
            _described_optimizer(target, optimizer, parts.modules, prefixes)
            for optimizer in parts.optimizers.values()
        ]
    added = {key: value for key, value in _wanted_by_trainer().items() if key not in checkpoint}
    checkpoint |= added
    checkpoint[FABRIC_KEYS] = {
        "modules": list(parts.modules),
        "optimizers": list(parts.optimizers),
        "prefixes": prefixes,
        "added": list(added),
    }
    save_lightning_checkpoint(target, checkpoint, path, None, own=own)


def _wanted_by_trainer() -> dict[str, Any]:
    """What Trainer insists on under Lightning's own strategies; taken out again when Lite or Fabric loads."""
    return {"pytorch-lightning_version": fabric_module().__version__, "lr_schedulers": []}


def _take_apart(content: Any) -> _Parts:
    if isinstance(content, ModuleState) or (_is_state_dict(content) and holds_shards(content)):
        return _Parts(modules={_RAW: content})
    parts = _Parts()
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, (nn.Module, ModuleState)):
            parts.modules[key] = value
        elif isinstance(value, (Optimizer, OptimizerStateDict)):
            parts.optimizers[key] = value
        elif not holds_shards(value):
            parts.rest[key] = value
        elif _is_state_dict(value):
            parts.modules[key] = value
        elif isinstance(value, Mapping) and {"state", "param_groups"} <= {*value}:
            parts.optimizers[key] = value
        else:
            raise CheckpointError(
                f"content[{key!r}] holds tensors of which each rank has a part, and is no state dict.",
                remedy="Save the model, the optimizer, or their `state_dict()`, each under a key of its own.",
            )
    taken = sorted(str(key) for key in parts.rest if key in _OF_LIGHTNING)
    if taken and (parts.modules or parts.optimizers):
        raise CheckpointError(
            f"content[{taken[0]!r}]: the shared checkpoint keeps something else under this name.",
            remedy="Choose another key.",
        )
    return parts


def _is_state_dict(value: Any) -> bool:
    """Return True if it is a flat mapping of names to tensors."""
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _prefix(key: str, module: Any, count: int) -> str:
    """What a module's names begin with: its key, unless it is what a Trainer would be given as a whole."""
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
    prefix = next((prefixes[key] for key, module in modules.items() if _is_of(module, owner)), None)
    if prefix is None:
        prefix = next(iter(prefixes.values())) if len(prefixes) == 1 and owner is None else ""
    return rename_parameters(state, lambda name: f"{prefix}{name}") if prefix else state


def _is_of(module: Any, owner: Any) -> bool:
    if isinstance(module, ModuleState):
        module = module.owner() if module.owner else None
    return owner is not None and isinstance(module, nn.Module) and unwrap_engine(module) is owner


def _refuse_parts_of_tensors(target: Any, content: Any) -> None:
    """Refuse a copied state dict in which plain tensors are parts: a file would hold them as if whole.

    Raises:
        CheckpointError: With the first name.
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
            part = any(box.size == shape for shard in known for box in shard.boxes)
            if part and not any(shard.shape == shape for shard in known):
                raise CheckpointError(
                    f"{name} of shape {shape} is this rank's part of {known[0].shape}; nothing says which.",
                    remedy="Save `model.state_dict()` as it is, a `copy.deepcopy` of it, or the model.",
                )


def save_file(strategy: Any, content: Any, path: Any) -> None:
    """Write content with ``torch.save``, or with the user's own checkpoint IO, from rank 0.

    No rank waits for another, because old scripts save under ``if self.is_global_zero``.
    """
    io = strategy._checkpoint_io
    if io is None or innermost_checkpoint_io(io) is not None:
        io = fabric_module("plugins.io").TorchCheckpointIO()
    if strategy.global_rank == 0:
        io.save_checkpoint(content, path)


def load_content(target: Any, path: Any, weights_only: bool | None) -> Any:
    """Read a checkpoint under the keys it was saved with; state dicts stay on disk until used. Collective.

    Args:
        target: The result of `state_of`.
        path: A path of any known format: a directory, a file or a URL.
        weights_only: False executes code that whoever wrote a file may have put there.
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
        content[key] = _own_names(source, index)
    return content


def _own_names(source: StoredContent, index: int) -> Any:
    """An optimizer's state as its module names the parameters."""
    assert source.optimizers is not None
    state = source.optimizers[index]
    names = [name for group in state["param_groups"] for name in group["params"]]
    prefixes = [prefix for prefix in map(source.prefix, source.keys["modules"]) if prefix]
    prefix = next((p for p in prefixes if all(str(name).startswith(p) for name in names)), "")
    return rename_parameters(state, lambda name: name.removeprefix(prefix)) if prefix else state
