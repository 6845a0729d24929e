"""List the strategies of the plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, StrategySpec, hookimpl

__all__ = ["CAPABILITIES", "nnx_strategies"]

CAPABILITIES = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    shards_parameters=True,
    shards_gradients=True,
    shards_optimizer=True,
    activation_checkpointing=True,
    meta_initialization=True,
    torch_compile=True,
    refuses=(
        *("gradients_read_on_rank_zero", "weights_read_on_rank_zero"),  # all ranks gather
        "state_dict_saved_on_rank_zero",
        *(
            "torch_func_grad",
            "gradient_surgery",
            "pipeline_split_backward",
            "sparse_gradients",
            "sparse_gradients_of_a_function",
        ),
    ),
)


def _spec(
    name: str,
    description: str,
    use_when: str,
    *,
    capabilities: Capabilities = CAPABILITIES,
    **init_params: object,
) -> StrategySpec:
    return StrategySpec(
        name=name,
        target="nnx_fsdp.backend:FSDPBackend",
        options="nnx_fsdp.options:FSDPOptions",
        memory="nnx_fsdp.memory:FSDPMemory",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/fsdp.md",
        capabilities=capabilities,
        init_params=init_params,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the FSDP2 strategies."""
    return [
        _spec(
            "fsdp_auto",
            "FSDP2 that chooses what to shard and says why",
            "the model or its optimizer state does not fit one device, or you want less memory than ddp",
        ),
        _spec(
            "fsdp_manual",
            "FSDP2 of the units that you wrap() in configure_model",
            "the model must be built and sharded layer by layer, or the automatic choice does not suit",
            capabilities=replace(CAPABILITIES, manual_wrap=True),
            auto_wrap=False,
        ),
        _spec(
            "fsdp_offload",
            "FSDP2 with parameters and optimizer in host memory",
            "the model does not fit the devices even when sharded, and host memory is large",
            capabilities=replace(CAPABILITIES, offload=True),
            cpu_offload=True,
        ),
        _spec(
            "fsdp_hybrid",
            "FSDP2 within a node, replicas across nodes (HSDP)",
            "several nodes with slow links between them, and a model that fits one node when sharded",
            hybrid=True,
        ),
    ]
