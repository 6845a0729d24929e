"""Registers a strategy as a plugin would that knows one copy of Lightning only.

Nothing else may import this: the next registration brings all registries up to date.
"""

import lightning_fabric.strategies

import nnx

nnx.StrategyRegistry.register("one_copy", "nnx_tiny.backend:TinyBackend", override=True)
lightning_fabric.strategies.STRATEGY_REGISTRY.remove("one_copy")
