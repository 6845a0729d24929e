"""Describe the strategy and the launcher of this plugin, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nnx_core import Capabilities, LauncherSpec, StrategySpec, hookimpl
from nnx_fsdp.plugin import CAPABILITIES

_ELASTIC: dict[str, Any] = {
    "precisions": ("32-true", "64-true", "bf16-true", "16-mixed", "bf16-mixed"),
    "repeated_closures": False,
    "multiple_optimizers": False,
    "manual_optimization": False,
    "leaves_no_files": False,
    "fabric": False,
}


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the elastic strategies."""
    return [
        StrategySpec(
            name="torchft_ddp",
            target="nnx_torchft.strategy:TorchftStrategy",
            options="nnx_torchft.options:ElasticOptions",
            description="elastic data parallelism on torchft: kill any group, the numbers stay",
            use_when="machines fail, join or leave while you train, and the model fits on one device",
            docs_url="docs/elastic.md",
            memory="nnx_torchft.memory:ElasticMemory",
            capabilities=Capabilities(
                **_ELASTIC, refuses=("sparse_gradients", "sparse_gradients_of_a_function")
            ),
        ),
        StrategySpec(
            name="torchft_hsdp",
            target="nnx_torchft.strategy:ShardedTorchftStrategy",
            options="nnx_torchft.options:ShardedElasticOptions",
            description="elastic groups of several processes, each sharded as by fsdp_auto",
            use_when="machines fail, join or leave while you train, and the model does not fit on one device",
            docs_url="docs/elastic.md",
            memory="nnx_torchft.memory:ShardedElasticMemory",
            capabilities=replace(CAPABILITIES, **_ELASTIC),
        ),
    ]


@hookimpl
def nnx_launchers() -> list[LauncherSpec]:
    """Return the launcher that starts groups and a lighthouse, and restarts groups that die."""
    return [
        LauncherSpec(
            "elastic",
            "nnx_torchft.launcher:ElasticLauncher",
            description="groups of elastic training on this machine, with a lighthouse",
            needs={"torchft": "torchft==0.2.0"},
        )
    ]
