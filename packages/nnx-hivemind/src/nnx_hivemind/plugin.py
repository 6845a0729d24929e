"""Describe the strategy of this plugin, as data."""

from __future__ import annotations

from nnx_core import Capabilities, StrategySpec, hookimpl


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the strategy."""
    return [
        StrategySpec(
            name="hivemind",
            target="nnx_hivemind.backend:HivemindBackend",
            options="nnx_hivemind.options:HivemindOptions",
            description="peers on the internet average gradients and weights, without a server",
            use_when="volunteers or sites train one model over the internet, and come and go",
            docs_url="docs/backends/hivemind.md",
            capabilities=Capabilities(
                precisions=("32-true", "bf16-mixed"),
                offload=True,
                exact=False,
                multiple_optimizers=False,
                repeated_closures=False,
                added_parameter_groups=False,
                unused_parameters=False,
                mixed_dtypes=False,
                sync_batchnorm=False,
                refuses=("sparse_gradients", "sparse_gradients_of_a_function"),
            ),
        )
    ]
