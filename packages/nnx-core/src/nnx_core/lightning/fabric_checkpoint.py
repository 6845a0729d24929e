"""Fabric's ``save`` and ``load`` on the shared checkpoint.

Fabric users choose their own keys. Modules and optimizers are stored under the same logical names as
Trainer's, and the keys beside them, so that either resumes the other's run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nnx_checkpoint.collective import control_group, together
from nnx_checkpoint.naming import (
    FABRIC_KEYS,
    RANKS,
    LazyStateDict,
    StoredRanks,
    stored_objects,
    stored_optimizer_states,
)
from nnx_checkpoint.state import parameter_names
from nnx_core.errors import CheckpointError
from nnx_core.lightning.checkpoint import (
    open_together,
    restore_model,
    restore_optimizers,
    save_lightning_checkpoint,
)
from nnx_core.lightning.routing import unwrap_engine, unwrap_optimizer
from nnx_core.random_state import RandomState
from nnx_core.shares import of_process


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
    random = {key: value for key, value in state.items() if isinstance(value, RandomState)}
    checkpoint: dict[str, Any] = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in state.items()
        if key not in modules and key not in optimizers and key not in random
    }
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
    own = next((value.state_dict() for value in random.values()), None)  # there is only one random state
    save_lightning_checkpoint(strategy, checkpoint, path, storage_options, own=own)


def _prefixes(modules: Mapping[str, Any]) -> dict[str, str]:
    """A single module is stored under plain names, as Trainer stores it; several under their keys."""
    return {key: "" if len(modules) == 1 else f"{key}." for key in modules}


def _prefixed(strategy: Any, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> Any:
    state = strategy.get_optimizer_state(optimizer)
    owner = strategy._owner(unwrap_optimizer(optimizer))
    prefix = next((p for key, p in _prefixes(modules).items() if modules[key] is owner), "")
    return rename_parameters(state, lambda name: f"{prefix}{name}")


def load_fabric_checkpoint(
    strategy: Any, path: Any, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Restore `state` in place and return what is left. Collective."""
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
    """An opened checkpoint, looked up by the user's keys.

    A checkpoint of logical names holds one model and numbered optimizers under Trainer's names; a file of
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
        """The whole checkpoint, tensors included, for users who ask for no particular object."""
        model = {} if self.stored is None else {"state_dict": LazyStateDict(self.stored)}
        states = {} if self.optimizers is None else {"optimizer_states": self.optimizers}
        return {**self.rest, **model, **states}

    def restore_random(self, random: RandomState, key: str, strict: bool) -> None:
        """Restore this rank's random state, or seed it from rank 0's. Collective."""
        ranks: Any = self.rest.get(RANKS, ()) if self.stored is None else StoredRanks(self.stored)
        with together(control_group(), doing="restoring the random state"):
            if self._found(len(ranks) > 0, key, strict):
                rank = of_process(self.strategy.global_rank)
                random.load_state_dict(ranks[rank if rank < len(ranks) else 0])

    def has(self, key: str, strict: bool) -> bool:
        """Whether the rest has this key; a missing one is an error if `strict`."""
        return self._found(key in self.rest, key, strict)

    def has_model(self, key: str, strict: bool) -> bool:
        """Whether there are weights for this key."""
        saved = self.keys["modules"]
        by_trainer = self.stored is not None and not saved
        return self._found(
            by_trainer or key in saved or key in self.rest or "state_dict" in self.rest, key, strict
        )

    def has_optimizer(self, key: str, index: int, strict: bool) -> bool:
        """Whether there is an optimizer state for this key."""
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
        """The state dict for a key; for None, the only one there is.

        Args:
            key: The user's.
            module: What it is for. Trainer's names begin with the attribute that holds a module, which is the
                key if that makes them this module's names.
        """
        if self.stored is not None:
            prefix = self.prefix(key)
            if not prefix and module is not None and not self.keys["modules"]:
                prefix = _prefix_of_attribute(LazyStateDict(self.stored), key, module)
            return LazyStateDict(self.stored, prefix=prefix)
        found: Mapping[str, Any] = self.rest.pop(key if key in self.rest else "state_dict", self.rest)
        return found

    def prefix(self, key: str | None) -> str:
        """What the names of the module under a key begin with: Lite says so, Fabric by their number."""
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
        module = self.strategy._owner(optimizer)
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
    """An optimizer's state under a module's own names, without what the checkpoint has before them."""
    own = {*parameter_names(module).values()}
    stored = [name for group in state["param_groups"] for name in group["params"]]
    if not stored or not isinstance(stored[0], str) or own.issuperset(stored):
        return state
    parts = stored[0].split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length]) + "."
        if all(name.startswith(prefix) and name.removeprefix(prefix) in own for name in stored):
            return rename_parameters(state, partial(_remove, prefix))
    return state


def _remove(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def rename_parameters(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's state under other names of its parameters."""
    groups = [{**g, "params": [rename(name) for name in g["params"]]} for g in state["param_groups"]]
    return {"state": {rename(k): v for k, v in state["state"].items()}, "param_groups": groups}
