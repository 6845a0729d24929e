"""Wrap models and optimizers for Lite, so that their state dicts work under every strategy.

Fabric's own wrappers pass ``state_dict`` and ``load_state_dict`` to torch, which does not know an engine's
shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from nnx_base.ranks import control_group, together
from nnx_checkpoint.reading.naming import LazyStateDict, numbered_optimizer_state, numbers_parameters
from nnx_checkpoint.reading.state import as_state_dict
from nnx_core._torch_compat import IncompatibleKeys
from nnx_core.lightning.checkpoint import read_optimizer_state
from nnx_core.lightning.fabric import FabricAdapter
from nnx_core.lightning.strategy_checkpoint import restore_model, restore_optimizers
from nnx_lite.copies import fabric_module
from nnx_lite.state_dicts import ModuleState, OptimizerStateDict, fill_module, fill_optimizer, holds_shards

if TYPE_CHECKING:
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
else:
    _FabricModule = fabric_module("wrappers")._FabricModule
    _FabricOptimizer = fabric_module("wrappers")._FabricOptimizer

__all__ = ["LiteModule", "LiteOptimizer", "unwrap", "wrap_module", "wrap_optimizers"]


class LiteModule(_FabricModule):
    """Fabric's wrapper of a model; its ``state_dict`` can be saved and loaded under every strategy."""

    _strategy: Any

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's state dict; under an engine, the values are this rank's shards."""
        values = super().state_dict(*args, **kwargs)
        if not isinstance(self._strategy, FabricAdapter) or args or kwargs:
            return values
        module = self._original_module
        return ModuleState(values, as_state_dict(self._strategy.backend.model_state(module)), module)

    def load_state_dict(  # type: ignore[override] # as Fabric's
        self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any
    ) -> Any:
        """Fill the model from a result of `state_dict` or `Lite.load`. Collective under an engine."""
        if not isinstance(self._strategy, FabricAdapter):
            return super().load_state_dict(state_dict, strict=strict, **kwargs)
        module, backend = self._original_module, self._strategy.backend
        if isinstance(state_dict, LazyStateDict):
            own = as_state_dict(backend.model_state(module))
            restore_model(backend, module, state_dict, strict=strict)
        else:
            own = as_state_dict(backend.model_state(module))
            with together(control_group(), doing="loading a state dict"):
                source = state_dict.described() if isinstance(state_dict, ModuleState) else state_dict
                fill_module(own, source, strict=strict)
            backend.finish_load(module, [])
        missing = [name for name in own if name not in state_dict]
        return IncompatibleKeys(missing, [name for name in state_dict if name not in own])


class LiteOptimizer(_FabricOptimizer):
    """Fabric's wrapper of an optimizer; under an engine, its state is keyed by parameter name."""

    _strategy: Any

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; under an engine, this rank's shards by parameter name."""
        values = super().state_dict()
        if not isinstance(self._strategy, FabricAdapter):
            return values
        return OptimizerStateDict(values, self._strategy.owner_of(self.optimizer))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the optimizer in place from a result of `state_dict` or `Lite.load`.

        Collective under an engine.
        """
        if not isinstance(self._strategy, FabricAdapter):
            self.optimizer.load_state_dict(complete_optimizer_state(state_dict))
            return
        backend, optimizer = self._strategy.backend, self.optimizer
        module = self._strategy.owner_of(optimizer)
        if not holds_shards(state_dict):
            restore_optimizers(backend, module, [optimizer], [state_dict])
            return
        with together(control_group(), doing="loading the state of an optimizer"):
            fill_optimizer(backend.optimizer_state(module, optimizer), state_dict)
        backend.finish_load(module, [optimizer])


def complete_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in torch's format: numbered, with tensors in memory."""
    if numbers_parameters(state) or not any(group["params"] for group in state["param_groups"]):
        return dict(state)
    return numbered_optimizer_state(read_optimizer_state(state))


def wrap_module(fabric: Any, wrapped: _FabricModule) -> LiteModule:
    """Replace Fabric's wrapper by Lite's."""
    made = LiteModule(wrapped._forward_module, fabric.strategy, original_module=wrapped._original_module)
    made._device, made._dtype = wrapped._device, wrapped._dtype
    return made


def wrap_optimizers(
    fabric: Any, module: nn.Module | None, wrapped: Sequence[_FabricOptimizer]
) -> list[LiteOptimizer]:
    """Replace Fabric's wrappers by Lite's, also in a LightningModule."""
    made = [LiteOptimizer(each.optimizer, fabric.strategy, fabric._callbacks) for each in wrapped]
    if module is not None and hasattr(module, "_fabric_optimizers"):
        setattr(module, "_fabric_optimizers", made)  # noqa: B010 # torch would type it as a parameter
    return made


def unwrap(content: Any) -> Any:
    """Replace wrappers at the top of a checkpoint's content by the user's modules and optimizers."""
    if isinstance(content, _FabricModule):
        return content.module
    if isinstance(content, _FabricOptimizer):
        return content.optimizer
    if type(content) is dict:
        return {key: unwrap(value) for key, value in content.items()}
    return content
