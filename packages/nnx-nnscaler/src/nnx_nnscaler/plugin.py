"""List the strategies and formats of the plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, CheckpointFormatSpec, StrategySpec, hookimpl

_OF_PLANS = (
    *("iterable_dataset_split_by_rank", "shuffle_seeded_by_rank"),  # the ranks of a unit read one batch
    *(
        "contrastive_loss_with_global_rank",
        "loss_scaled_by_world_size",
    ),  # their step divides by `data_rank`
    *("autograd_grad_of_weight", "gradient_penalty"),  # programs shard the forward
)
_OF_RANKS = ("gradient_surgery", "pipeline_split_backward")  # each rank would use its own samples' gradients
_OF_PARTS = ("gradients_read_on_rank_zero", "weights_read_on_rank_zero")  # all ranks gather
_PLANNED = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    shards_parameters=True,
    shards_gradients=True,
    shards_optimizer=True,
    tensor_parallel=True,
    activation_checkpointing=True,
    meta_initialization=True,
    needs_sample=True,
    leaves_no_files=False,  # users read the generated code
    refuses=(*_OF_RANKS, *_OF_PLANS, *_OF_PARTS),
)
# A cost model shards only parameters that are worth it: none of a model that fits easily.
_CHOSEN = replace(
    _PLANNED,
    shards_parameters=False,
    shards_gradients=False,
    shards_optimizer=False,
    refuses=(*_OF_RANKS, *_OF_PLANS),
)
_REPLICATED = replace(
    _CHOSEN,
    refuses=("gradient_surgery",),
    tensor_parallel=False,
    activation_checkpointing=False,
    needs_sample=False,
    leaves_no_files=True,
)
_SHARDED = replace(
    _PLANNED,
    refuses=(*_OF_RANKS, *_OF_PARTS, "reentrant_checkpointing_on_rank_zero"),
    tensor_parallel=False,
    activation_checkpointing=False,
    needs_sample=False,
    leaves_no_files=True,
)


def _spec(
    name: str,
    description: str,
    use_when: str,
    *,
    capabilities: Capabilities = _PLANNED,
    memory: str = "SplitMemory",
    **init_params: object,
) -> StrategySpec:
    return StrategySpec(
        name=name,
        target="nnx_nnscaler.backend:NnScalerBackend",
        options="nnx_nnscaler.options:NnScalerOptions",
        memory=f"nnx_nnscaler.memory:{memory}",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/nnscaler.md",
        capabilities=capabilities,
        init_params=init_params,
    )


_STAGES = replace(
    _PLANNED,
    tensor_parallel=False,
    pipeline=True,
    refuses=tuple(name for name in _PLANNED.refuses if name != "gradient_penalty"),
)


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the strategies of the compiler."""
    return [
        _spec(
            "nnscaler",
            "A planner splits every operator; sharded checkpoints",
            "you want the split of every operator chosen for you, and the fastest resume",
            capabilities=_CHOSEN,
            state_dict_type="sharded",
        ),
        _spec(
            "nnscaler_deduped",
            "A planner splits every operator; small checkpoints",
            "as nnscaler, with each element stored once in a checkpoint",
            capabilities=_CHOSEN,
        ),
        _spec(
            "nnscaler_dp",
            "Data parallelism, bit-equal to ddp",
            "the model and its optimizer state fit every device",
            capabilities=_REPLICATED,
            memory="ReplicaMemory",
            policy="dp",
        ),
        _spec(
            "nnscaler_tp",
            "Tensor parallelism by a planner, within a node",
            "single layers are too large for one device, or the batch is too small to be split",
            policy="tp",
        ),
        _spec(
            "nnscaler_zero",
            "Data parallelism, all states sharded (ZeRO)",
            "the batch can be split over the ranks, but the states do not fit every device",
            capabilities=_SHARDED,
            memory="RowMemory",
            policy="zero",
        ),
        _spec(
            "nnscaler_pp",
            "Pipeline parallelism: a stage of layers on each rank",
            "the model fits no device, and links between devices are too slow to split layers",
            capabilities=_STAGES,
            memory="StageMemory",
            policy="pp",
        ),
        _spec(
            "nnscaler_hybrid",
            "Stages, and a planner that splits the operators of each",
            "the model fits no device, and some links are fast and others slow",
            capabilities=replace(_STAGES, tensor_parallel=True),
            memory="StageMemory",
            policy="hybrid",
        ),
    ]


@hookimpl
def nnx_checkpoint_formats() -> list[CheckpointFormatSpec]:
    """Return the format of Microsoft's nnScaler."""
    return [
        CheckpointFormatSpec(
            "nnscaler",
            "nnx_nnscaler.checkpoints:NnScaler",
            description="nnScaler directory of <rank>.pt files, or its merged file; read only",
        )
    ]
