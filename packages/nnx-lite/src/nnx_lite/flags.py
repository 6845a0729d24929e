"""Translate Lite's flags, with their meaning in LightningLite, to the keywords of ``Fabric(...)``.

A device that this machine lacks raises an error here, before any process starts. Objects of Trainer, or of
the other copy of Lightning, become objects of the Fabric in use.
"""

from __future__ import annotations

from typing import Any

from nnx_core.errors import OptionError
from nnx_core.lightning.registration import build, explain_missing
from nnx_core.names.catalog import historical
from nnx_core.names.registry import StrategyRegistry
from nnx_lite.copies import FABRIC_ROOT, fabric_module, root_of
from nnx_lite.hardware import accelerator_name, choose_hardware, take_accelerator
from nnx_lite.plugins import choose_plugins
from nnx_lite.precision import choose_precision, is_precision
from nnx_lite.strategies import fabric_strategy

__all__ = ["fabric_arguments"]

FLAGS = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "gpus", "tpu_cores")
"""The names of the flags, in the order of the old constructor."""
TRANSLATED = ("tpu_spawn", "ddp_sharded", "ddp_sharded_spawn")
"""LightningLite's strategy names that nothing registers any more; the catalog has their successors."""
_SPAWNING = ("ddp_sharded_spawn",)
_DEFAULT_PRECISION = 32


def fabric_arguments(
    *,
    accelerator: Any = None,
    strategy: Any = None,
    devices: Any = None,
    num_nodes: Any = 1,
    precision: Any = _DEFAULT_PRECISION,
    plugins: Any = None,
    gpus: Any = None,
    tpu_cores: Any = None,
) -> dict[str, Any]:
    """Return the keywords of ``Fabric(...)`` with the meaning of LightningLite's flags.

    Raises:
        OptionError: A flag's value is unknown, or flags contradict each other.
        UnsupportedError: This machine lacks the accelerator.
        StrategyNotInstalledError: The strategy's package is missing.
    """
    _check_num_nodes(num_nodes)
    chosen = _choose_strategy(strategy)
    accelerator = accelerator_name(accelerator)
    if not isinstance(chosen, str):
        accelerator = take_accelerator(chosen, accelerator)
    hardware = choose_hardware(accelerator, devices, gpus, tpu_cores)
    chosen_plugins = choose_plugins(plugins)
    return {
        "accelerator": hardware.accelerator,
        "strategy": chosen,
        "devices": hardware.devices,
        "num_nodes": num_nodes,
        "precision": _precision_flag(chosen_plugins, chosen, precision),
        "plugins": chosen_plugins,
    }


def _check_num_nodes(num_nodes: Any) -> None:
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1:
        raise OptionError(f"num_nodes={num_nodes!r} is not a number of nodes.", remedy="Pass 1 or more.")


def _choose_strategy(strategy: Any) -> Any:
    """Return a name for Fabric, or an object of its strategy classes."""
    if strategy is None:
        return "auto"
    if isinstance(strategy, str):
        return _by_name(strategy.lower())
    if root_of(strategy, "strategies", "Strategy") is None:
        counts = isinstance(strategy, (int, list, tuple))
        hint = f"Did you mean `devices={strategy!r}`? The second argument is the strategy. " if counts else ""
        raise OptionError(
            f"strategy={strategy!r} is neither a name nor a strategy.",
            remedy=f"{hint}Pass a name that `nnx list` shows, or an object of {FABRIC_ROOT}.strategies.",
        )
    return fabric_strategy(strategy)


def _by_name(name: str) -> Any:
    registry = fabric_module("strategies").STRATEGY_REGISTRY
    if name not in TRANSLATED:
        if name != "auto" and name not in registry:
            raise explain_missing(name, registry)
        return name
    successor = historical()[name].successor
    if name in _SPAWNING:
        spec = StrategyRegistry.get(successor)
        return build(spec, namespace=FABRIC_ROOT, overrides={"start_method": "spawn"})
    return successor


def _precision_flag(plugins: list[Any], strategy: Any, precision: Any) -> str | None:
    """Return the precision flag, or None if a plugin or the strategy sets the precision."""
    given = [type(plugin).__name__ for plugin in plugins if is_precision(plugin)]
    own = getattr(strategy, "_precision", None)
    given += [type(own).__name__] if own is not None else []
    if not given:
        return choose_precision(precision)
    if precision not in (None, _DEFAULT_PRECISION):
        raise OptionError(
            f"precision={precision!r} contradicts the {given[0]} object that you passed.",
            remedy="Drop one of them.",
        )
    return None
