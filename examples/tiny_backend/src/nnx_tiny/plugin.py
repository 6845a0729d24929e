"""The specs of nnx-tiny's strategies, as data: imports neither torch nor the engine."""

from __future__ import annotations

from nnx_core import Capabilities, StrategySpec, hookimpl

_PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_REFUSES = ("loss_backward_called_directly", "gradient_surgery", "pipeline_split_backward", "lbfgs")


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the specs of one engine in two forms: a backend, and a Lightning strategy."""
    return [
        StrategySpec(
            "tiny",
            "nnx_tiny.backend:TinyBackend",
            description="Data parallelism in one small class",
            use_when="you want to see how small a backend can be",
            capabilities=Capabilities(precisions=_PRECISIONS, refuses=_REFUSES),
            options="nnx_tiny.options:TinyOptions",
            memory="nnx_core.planning.replay:Replay",
        ),
        StrategySpec(
            "tiny_lightning",
            "nnx_tiny.strategy:TinyStrategy",
            description="The same as tiny, as a strategy of lightning.pytorch",
            use_when="you want to see what nnx-core does for a backend",
            capabilities=Capabilities(precisions=_PRECISIONS, fabric=False),
        ),
    ]
