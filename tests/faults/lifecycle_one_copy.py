"""Registers a strategy as a plugin would that knows only one copy of Lightning.

No other module may import this: the next registration updates all registries.
"""

import lightning_fabric.strategies

import nnx

nnx.StrategyRegistry.register("one_copy", "nnx_tiny.backend:TinyBackend", override=True)
lightning_fabric.strategies.STRATEGY_REGISTRY.remove("one_copy")
