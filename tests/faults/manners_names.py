"""Registers the fault that has to declare a precision."""

import nnx

nnx.StrategyRegistry.register(
    "computes_in_half",
    "faults.manners:ComputesInHalf",
    override=True,
    capabilities=nnx.Capabilities(precisions=("32-true", "bf16-mixed")),
)
