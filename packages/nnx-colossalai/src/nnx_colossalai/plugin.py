"""Register the strategies and the checkpoint format of the plugin."""

from __future__ import annotations

from nnx_core import Capabilities, CheckpointFormatSpec, StrategySpec, hookimpl

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


def _spec(name: str, description: str, use_when: str, **init_params: object) -> StrategySpec:
    return StrategySpec(
        name=name,
        target="nnx_colossalai.backend:ColossalAIBackend",
        options="nnx_colossalai.options:ColossalAIOptions",
        memory="nnx_colossalai.memory:ChunkMemory",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/colossalai.md",
        capabilities=_CAPABILITIES,
        option_of="colossalai" if init_params else "",
        init_params=init_params,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the strategies with chunked memory."""
    return [
        _spec(
            "colossalai",
            "Weights on the device or in host memory, by a plan",
            "the model is larger than the devices, and host memory is plenty",
        ),
        _spec(
            "colossalai_auto",
            "The same as colossalai, by its placement policy's name",
            "as colossalai",
            placement_policy="auto",
        ),
        _spec(
            "colossalai_cuda",
            "Sharded over the devices, all in device memory",
            "everything fits the devices once it is sharded",
            placement_policy="cuda",
        ),
        _spec(
            "colossalai_cpu",
            "Weights in host memory, on the device while in use",
            "device memory is so short that even the weights do not fit",
            placement_policy="cpu",
        ),
    ]


@hookimpl
def nnx_checkpoint_formats() -> list[CheckpointFormatSpec]:
    """Return the checkpoint format of ColossalAI's `Booster`."""
    return [
        CheckpointFormatSpec(
            "colossalai",
            "nnx_colossalai.checkpoints:ColossalAI",
            description="ColossalAI sharded checkpoint with index files; read only",
        )
    ]
