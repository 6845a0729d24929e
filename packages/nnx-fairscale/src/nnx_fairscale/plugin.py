"""Describe the strategies and the checkpoint format of this plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, CheckpointFormatSpec, StrategySpec, hookimpl

_WHOLE_MODEL_OPTIMIZERS = ("global_norm_optimizer", "sam_by_closure", "lbfgs")
_WHOLE_PARAMETER_OPTIMIZERS = (
    *("lamb", "muon", "muon_for_large_matrices", "muon_with_param_groups", "shampoo", "adafactor"),
)
_GRADIENTS_AND_STATE = (
    "gradient_surgery",
    "pipeline_split_backward",
    "optimizer_state_read",
    "optimizer_state_changed",
)
_OSS = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    shards_optimizer=True,
    meta_initialization=True,
    repeated_closures=False,
    refuses=(*_WHOLE_MODEL_OPTIMIZERS, *_GRADIENTS_AND_STATE, "gradients_set_without_backward"),
)
_SHARDED = replace(
    _OSS,
    shards_gradients=True,
    refuses=(
        *(*_OSS.refuses, "loss_backward_called_directly"),
        *("optimizer_created_in_hook", "optimizer_outside_lightning", "training_without_optimizer"),
    ),
)
_FSDP = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "16-mixed", "bf16-mixed"),
    shards_parameters=True,
    shards_gradients=True,
    shards_optimizer=True,
    offload=True,
    manual_wrap=True,
    activation_checkpointing=True,
    meta_initialization=True,
    refuses=(
        *_WHOLE_PARAMETER_OPTIMIZERS,
        *_WHOLE_MODEL_OPTIMIZERS,
        *_GRADIENTS_AND_STATE,
        *(
            "loss_backward_called_directly",
            "model_pruning_callback",
            "sparse_gradients",
            "sparse_gradients_of_a_function",
            "backward_error_caught",
        ),
        "keyword_only_closure",  # its optimizer needs unsharded parameters
        *("gradients_read_on_rank_zero", "weights_read_on_rank_zero"),  # all ranks gather
        # A unit is reduced once in a backward. A backward inside works only for a unit that is recomputed
        # completely.
        *(
            "backward_inside_backward",
            "reentrant_checkpointing",
            "reentrant_checkpointing_while_accumulating",
        ),
        "reentrant_checkpointing_on_rank_zero",
    ),
)


def _spec(
    name: str,
    target: str,
    options: str,
    description: str,
    use_when: str,
    *,
    memory: str,
    capabilities: Capabilities,
) -> StrategySpec:
    return StrategySpec(
        name=name,
        target=f"nnx_fairscale.{target}",
        options=f"nnx_fairscale.options:{options}",
        memory=f"nnx_fairscale.memory:{memory}",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/fairscale.md",
        capabilities=capabilities,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return fairscale's three ways of sharding."""
    return [
        _spec(
            "fairscale_fsdp",
            "fsdp:FairscaleFSDPBackend",
            "FairscaleFSDPOptions",
            "fairscale's FullyShardedDataParallel",
            "a code base depends on fairscale's FSDP or its wrap(); new ones take fsdp_auto",
            memory="FairscaleFSDPMemory",
            capabilities=_FSDP,
        ),
        _spec(
            "fairscale_oss",
            "oss:OSSBackend",
            "OSSOptions",
            "fairscale's OSS: sharded optimizer state",
            "a code base depends on fairscale's OSS, or an optimizer needs whole parameters",
            memory="OSSMemory",
            capabilities=_OSS,
        ),
        _spec(
            "fairscale_sharded",
            "sharded:ShardedBackend",
            "ShardedOptions",
            "fairscale's ShardedDDP with its bugs fixed",
            "a code base depends on fairscale's ShardedDDP (ddp_sharded of old)",
            memory="ShardedMemory",
            capabilities=_SHARDED,
        ),
    ]


@hookimpl
def nnx_checkpoint_formats() -> list[CheckpointFormatSpec]:
    """Return the format of weights that programs saved with fairscale's FSDP, rank by rank."""
    return [
        CheckpointFormatSpec(
            "fairscale",
            "nnx_fairscale.checkpoints:FairscaleShards",
            description="directory of fairscale FSDP's sharded weights with their metadata; read only",
        )
    ]
