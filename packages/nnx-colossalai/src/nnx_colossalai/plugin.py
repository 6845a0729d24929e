"""The front door of the plugin: what it offers, as data."""

from __future__ import annotations

from nnx_core import Capabilities, StrategySpec, hookimpl

_CAPABILITIES = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    shards_parameters=True,
    shards_gradients=True,
    shards_optimizer=True,
    offload=True,
    activation_checkpointing=True,
    meta_initialization=True,
    refuses=(
        *("gradients_read_on_rank_zero", "weights_read_on_rank_zero"),  # all ranks gather
        *("functional_gradients", "combined_gradients", "sparse_gradients"),
    ),
)


def _spec(name: str, description: str, use_when: str, **init_params: object) -> StrategySpec:
    return StrategySpec(
        name=name,
        target="nnx_colossalai.backend:ColossalAIBackend",
        options="nnx_colossalai.options:ColossalAIOptions",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/colossalai.md",
        capabilities=_CAPABILITIES,
        init_params=init_params,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """The strategies with chunked memory."""
    return [
        _spec(
            "colossalai",
            "Chunked memory: a plan within your budgets puts each layer on the device or in host memory",
            "the model is larger than the devices, and host memory is plenty",
        ),
        _spec(
            "colossalai_auto",
            "The same as colossalai, by the name of its placement policy",
            "as colossalai",
            placement_policy="auto",
        ),
        _spec(
            "colossalai_cuda",
            "Chunked memory that stays on the devices, sharded over them",
            "everything fits the devices once it is sharded",
            placement_policy="cuda",
        ),
        _spec(
            "colossalai_cpu",
            "Chunked memory in host memory: weights are on the device only while they are used",
            "device memory is so short that even the weights do not fit",
            placement_policy="cpu",
        ),
    ]
