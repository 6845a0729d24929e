"""The Fabric adapter: Lightning Fabric's `Strategy` interface on top of a `Backend`, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.ranks import control_group, together
from nnx_checkpoint.reading.naming import (
    FABRIC_KEYS,
    RANKS,
    LazyStateDict,
    StoredRanks,
    stored_objects,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.state import parameter_names, repoint_optimizer
from nnx_checkpoint.writing.background import poll
from nnx_core._torch_compat import complete_optimizer
from nnx_core.backend import Backend
from nnx_core.errors import CheckpointError, OptionError, UnsupportedError
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.routing import (
    EngineModule,
    has_own_backward,
    publishes_gradients,
    route_optimizer_steps,
    route_precision,
    unwrap_engine,
    unwrap_optimizer,
)
from nnx_core.lightning.sample import example_inputs
from nnx_core.lightning.strategy_checkpoint import (
    module_state_dict,
    open_together,
    restore_model,
    restore_optimizers,
    save_lightning_checkpoint,
)
from nnx_core.random_state import RandomState
from nnx_core.view.modules import refuse_layers


class _SyncControl:
    """Fabric's interface for skipping gradient synchronisation while accumulating."""

    def __init__(self) -> None:
        self.is_accumulating = False

    @contextmanager
    def no_backward_sync(self, module: EngineModule, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self.is_accumulating = True
        try:
            with module.backend.no_sync(module.module):
                yield
        finally:
            self.is_accumulating = False


class FabricAdapter(ParallelProcesses):
    """Mixin that makes a `Backend` a strategy of Fabric; combined with the tree's ``ParallelStrategy``.

    Attributes:
        models: The models that were set up, in order.
    """

    precision: Any
    _checkpoint_io: Any

    def __init__(self, backend: Backend[Any], **kwargs: Any) -> None:
        self.models: list[nn.Module] = []
        self._owners: dict[Optimizer, nn.Module] = {}
        self._sync_control = _SyncControl()
        super().__init__(backend, **kwargs)
        if self.common.memory_checkpoint is not None:
            raise OptionError(
                f"memory_checkpoint={self.common.memory_checkpoint} needs a Trainer, whose state nnx knows.",
                remedy="Leave it out under Fabric, and save with async_save=True.",
            )
        if self.common.check_plan:
            raise OptionError(
                "check_plan=True needs a Trainer, whose steps nnx knows.",
                remedy="Leave it out under Fabric, and call nnx.plan(model, batch).",
            )

    @property
    def _backward_sync_control(self) -> _SyncControl:
        return self._sync_control

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: Any) -> None:
        """Fabric's base class sets None in its constructor."""

    def _precision_name(self) -> str:
        return str(self.precision.precision)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks; returns the norm before clipping."""
        self.precision.unscale_gradients(optimizer)
        return self.backend.clip_grad_norm(
            unwrap_optimizer(optimizer),
            float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp every gradient element into ``[-clip_val, clip_val]``."""
        self.precision.unscale_gradients(optimizer)
        self.backend.clip_grad_value(unwrap_optimizer(optimizer), float(clip_val))

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context that makes modules on the device, or on ``meta`` with `empty_init`."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else self.root_device)
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.backend.module_init_context())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the backend's context; the older name of `module_init_context`."""
        return self.backend.module_init_context()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `Backend.parallelize` moves the module, layer by layer if necessary."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Lay the module out, and replace the parameters in existing optimizers."""
        self._refuse_layers(module)
        replaced = self._parallelize(module)
        for optimizer in optimizers:
            complete_optimizer(optimizer)
            repoint_optimizer(optimizer, replaced)
            self._owners[optimizer] = module
        self.backend.setup_optimizers(module, optimizers)
        route_optimizer_steps(optimizers, self.backend, module)
        return EngineModule(module, self.backend, self._batches), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Lay the module out; `setup_optimizer` may follow."""
        self._parallelize(module)
        return EngineModule(module, self.backend, self._batches)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer over the parameters of a module that was set up before."""
        module = self._owners[optimizer] = self.owner_of(optimizer)
        self._refuse_layers(module)
        complete_optimizer(optimizer)
        self.backend.setup_optimizers(module, [optimizer])
        route_optimizer_steps([optimizer], self.backend, module)
        return optimizer

    def _refuse_layers(self, module: nn.Module) -> None:
        refuse_layers(module, shares=self.backend.data_parallel_rank_and_size[1])

    def _parallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        replaced = self.backend.parallelize(module, lambda: example_inputs(module))
        route_precision(self.precision, self.backend)
        self.models.append(module)
        self._log_beginning(module)
        return replaced

    def owner_of(self, optimizer: Optimizer) -> nn.Module:
        """Return the model whose parameters an optimizer holds."""
        if optimizer in self._owners:  # the engine may have replaced its parameters since
            return self._owners[optimizer]
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self.models:
            if wanted & {id(parameter) for parameter in module.parameters()}:
                return module
        raise UnsupportedError(
            f"{type(optimizer).__name__} holds no parameter of a module that was set up.",
            remedy="Call `fabric.setup_module(model)` first and build the optimizer from "
            "`model.parameters()`, or pass both to `fabric.setup(model, optimizer)`.",
        )

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute and publish gradients; the user's loop may read them.

        Fabric may pass no module. The engine then gets all modules.
        """
        if module is None:
            module = self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)
        module = unwrap_engine(module)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None and has_own_backward(self.backend):  # replaces the plugin's, which scales
            tensor = scaler.scale(tensor)
        super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc] # of the tree's
        if publishes_gradients(self.backend) and not self._sync_control.is_accumulating:
            self.backend.publish_gradients(module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, raise errors of a finished background save, and compare the ranks if due."""
        poll()
        result = super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc] # of the tree's Strategy
        module = self.owner_of(unwrap_optimizer(optimizer))
        self.divergence_check.after_step(
            module, lambda: [o for o, owner in self._owners.items() if owner is module]
        )
        return result

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the result reaches every rank."""
        return self._reduce(tensor, group, reduce_op)

    @property
    def checkpoint_io(self) -> Any:
        """The user's checkpoint IO, or `nnx.CheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._own_checkpoint_io()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return handles on this rank's shards by parameter name."""
        return module_state_dict(self.backend, unwrap_engine(module))

    def get_optimizer_state(self, optimizer: Any) -> Any:
        """Return handles on this rank's optimizer state by parameter name."""
        raw = unwrap_optimizer(optimizer)
        return self.backend.optimizer_state(self.owner_of(raw), raw)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load this rank's shards of a module in place."""
        restore_model(self.backend, unwrap_engine(module), state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save modules, optimizers and all other values in `state`. Collective.

        Args:
            path: The directory to write.
            state: Modules, optimizers, objects with ``state_dict``, and values, by the user's own keys.
            storage_options: Passed to another CheckpointIO than nnx's.
            filter: A function per key of `state` that returns True for the entries of its state dict to keep.
        """
        save_fabric_checkpoint(self, self.broadcast(path), state, storage_options, filter or {})

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore the objects in `state` in place, and return the other entries.

        Args:
            path: A checkpoint of any nnx strategy, of Trainer or Fabric, or a file of ``torch.save``.
            state: The `state` of `save_checkpoint`; a single module or optimizer for a raw state dict; None
                returns all entries of the checkpoint.
            strict: Refuse keys of `state` that the checkpoint does not have.
            weights_only: Passed to ``torch.load`` for single files.
        """
        return load_fabric_checkpoint(self, self.broadcast(path), state, strict, weights_only)


# Fabric users choose their own keys. Modules and optimizers are stored under the logical names of Trainer's
# checkpoints, and the keys separately, so that Trainer and Fabric resume each other's runs.


def save_fabric_checkpoint(
    strategy: Any,
    path: Any,
    state: Mapping[str, Any],
    storage_options: Any,
    filters: Mapping[str, Callable[[str, Any], bool]],
) -> None:
    """Save Fabric's state dict. Collective."""
    modules = {key: unwrap_engine(value) for key, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    checkpoint, own = objects_to_save(
        {key: value for key, value in state.items() if key not in modules and key not in optimizers}
    )
    if modules:
        checkpoint["state_dict"] = {
            f"{prefix}{name}": value
            for key, prefix in _prefixes(modules).items()
            for name, value in strategy.get_module_state_dict(modules[key]).items()
            if key not in filters or filters[key](name, value)
        }
    if optimizers:
        checkpoint["optimizer_states"] = [
            _prefixed(strategy, modules, optimizer) for optimizer in optimizers.values()
        ]
    checkpoint[FABRIC_KEYS] = {"modules": list(modules), "optimizers": list(optimizers)}
    save_lightning_checkpoint(strategy, checkpoint, path, storage_options, own=own)


def objects_to_save(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the saved state of objects other than modules and optimizers.

    Returns:
        The states, or the objects themselves if they have none; and this rank's random state, if it is among
        them. Each rank saves its own.
    """
    random = [value for value in objects.values() if isinstance(value, RandomState)]
    states = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in objects.items()
        if not isinstance(value, RandomState)
    }
    return states, random[0].state_dict() if random else None


def _prefixes(modules: Mapping[str, Any]) -> dict[str, str]:
    """Return the prefix of each module's names: none for a single module, as in Trainer's; else its key."""
    return {key: "" if len(modules) == 1 else f"{key}." for key in modules}


def _prefixed(strategy: Any, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> Any:
    state = strategy.get_optimizer_state(optimizer)
    owner = strategy.owner_of(unwrap_optimizer(optimizer))
    prefix = next((p for key, p in _prefixes(modules).items() if modules[key] is owner), "")
    return rename_parameters(state, lambda name: f"{prefix}{name}")


def load_fabric_checkpoint(
    strategy: Any, path: Any, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Restore `state` in place, and return the remaining entries. Collective."""
    source = StoredContent(strategy, path, weights_only)
    if isinstance(state, nn.Module):
        restore_model(strategy.backend, unwrap_engine(state), source.model(None), strict=strict)
        return {}
    if isinstance(state, Optimizer):
        source.restore_optimizer(state, None, 0)
        return {}
    if not state:
        return source.everything()
    modules = [key for key, value in state.items() if isinstance(value, nn.Module)]
    optimizers = [key for key, value in state.items() if isinstance(value, Optimizer)]
    for key in modules:
        if source.has_model(key, strict):
            module = unwrap_engine(state[key])
            restore_model(strategy.backend, module, source.model(key, module), strict=strict)
    for index, key in enumerate(optimizers):
        if source.has_optimizer(key, index, strict):
            source.restore_optimizer(state[key], key, index)
    for key in [key for key in state if key not in modules and key not in optimizers]:
        if isinstance(state[key], RandomState):
            source.restore_random(state[key], key, strict)
        elif source.has(key, strict):
            value = source.rest.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
    return source.rest


class StoredContent:
    """An open checkpoint, with look-ups by the user's keys.

    A checkpoint with logical names holds one model and numbered optimizers under Trainer's names. A file of
    ``torch.save`` holds the state dicts under the user's own keys.
    """

    def __init__(self, strategy: Any, path: Any, weights_only: bool | None) -> None:
        self.strategy = strategy
        self.path = path
        opened = open_together(strategy, path, weights_only)
        self.stored = None if isinstance(opened, dict) else opened
        if isinstance(opened, dict):
            self.rest = opened
            self.optimizers = opened.pop("optimizer_states", None)
        else:
            self.rest = dict(stored_objects(opened, "trainer"))
            self.optimizers = stored_optimizer_states(opened)
        self.keys = self.rest.pop(FABRIC_KEYS, {"modules": [], "optimizers": []})
        for key in self.keys.get("added", ()):
            self.rest.pop(key, None)

    def everything(self) -> dict[str, Any]:
        """Return all entries of the checkpoint, tensors included."""
        model = {} if self.stored is None else {"state_dict": LazyStateDict(self.stored)}
        states = {} if self.optimizers is None else {"optimizer_states": self.optimizers}
        return {**self.rest, **model, **states}

    def restore_random(self, random: RandomState, key: str, strict: bool) -> None:
        """Restore this rank's random state, or rank zero's if there were fewer ranks. Collective."""
        ranks: Any = self.rest.get(RANKS, ()) if self.stored is None else StoredRanks(self.stored)
        with together(control_group(), doing="restoring the random state"):
            if self._found(len(ranks) > 0, key, strict):
                rank = self.strategy.global_rank
                random.load_state_dict(ranks[rank if rank < len(ranks) else 0])

    def has(self, key: str, strict: bool) -> bool:
        """Return True if the other entries have this key; raise for a missing one if `strict`."""
        return self._found(key in self.rest, key, strict)

    def has_model(self, key: str, strict: bool) -> bool:
        """Return True if there are weights for this key."""
        saved = self.keys["modules"]
        by_trainer = self.stored is not None and not saved
        return self._found(
            by_trainer or key in saved or key in self.rest or "state_dict" in self.rest, key, strict
        )

    def has_optimizer(self, key: str, index: int, strict: bool) -> bool:
        """Return True if there is an optimizer state for this key."""
        saved = self.keys["optimizers"]
        by_trainer = self.optimizers is not None and not saved and index < len(self.optimizers)
        return self._found(by_trainer or key in saved or key in self.rest, key, strict)

    def _found(self, found: bool, key: str, strict: bool) -> bool:
        if strict and not found:
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} has nothing under the key {key!r}.",
                remedy="Remove it from `state`, or pass `strict=False`.",
            )
        return found

    def model(self, key: str | None, module: nn.Module | None = None) -> Mapping[str, Any]:
        """Return the state dict of a key; for None, the only one.

        Args:
            key: The user's key.
            module: The module to load. Names in Trainer's checkpoints begin with the attribute of the
                LightningModule that holds it; the key can be that attribute.
        """
        if self.stored is not None:
            prefix = self.prefix(key)
            if not prefix and module is not None and not self.keys["modules"]:
                prefix = _prefix_of_attribute(LazyStateDict(self.stored), key, module)
            return LazyStateDict(self.stored, prefix=prefix)
        found: Mapping[str, Any] = self.rest.pop(key if key in self.rest else "state_dict", self.rest)
        return found

    def prefix(self, key: str | None) -> str:
        """Return the prefix of a module's names: Lite stores it, Fabric numbers modules."""
        prefixes: Mapping[Any, str] = self.keys.get("prefixes", {})
        several = len(self.keys["modules"]) > 1
        return prefixes.get(key, f"{key}." if several else "")

    def restore_optimizer(self, wrapped: Optimizer, key: str | None, index: int) -> None:
        """Fill one optimizer in place."""
        optimizer = unwrap_optimizer(wrapped)
        if self.optimizers is None:
            state = self.rest if key is None else self.rest.pop(key)
        else:
            state = self.optimizers[self._position(key, index)]
        module = self.strategy.owner_of(optimizer)
        states = [_under_names_of(module, state)]
        restore_optimizers(self.strategy.backend, module, [optimizer], states)

    def _position(self, key: str | None, index: int) -> int:
        saved: list[str] = self.keys["optimizers"]
        return saved.index(key) if key in saved else index


def _prefix_of_attribute(stored: Mapping[str, Any], key: str | None, module: nn.Module) -> str:
    own = {*parameter_names(module).values()}
    fits = not all(name in stored for name in own) and all(f"{key}.{name}" in stored for name in own)
    return f"{key}." if fits else ""


def _under_names_of(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state under a module's own names, without the checkpoint's prefix."""
    own = {*parameter_names(module).values()}
    stored = [name for group in state["param_groups"] for name in group["params"]]
    if not stored or not isinstance(stored[0], str) or own.issuperset(stored):
        return state
    levels = stored[0].split(".")
    for length in range(1, len(levels)):
        prefix = ".".join(levels[:length]) + "."
        if all(name.startswith(prefix) and name.removeprefix(prefix) in own for name in stored):
            return rename_parameters(state, partial(_remove, prefix))
    return state


def _remove(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def rename_parameters(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return an optimizer's state with renamed parameters."""
    groups = [{**g, "params": [rename(name) for name in g["params"]]} for g in state["param_groups"]]
    return {"state": {rename(k): v for k, v in state["state"].items()}, "param_groups": groups}
