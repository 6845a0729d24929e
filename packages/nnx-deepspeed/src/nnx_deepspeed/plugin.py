"""Describe the strategies and checkpoint formats of this plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, CheckpointFormatSpec, StrategySpec, hookimpl

_STAGE_1 = Capabilities(
    accelerators=("cpu", "cuda"),
    precisions=("32-true", "16-mixed", "bf16-mixed"),
    shards_optimizer=True,
    multiple_optimizers=False,
    added_parameter_groups=False,
    repeated_closures=False,
    freezing_while_training=False,
    mixed_dtypes=False,
    refuses=(
        *("lamb", "muon", "muon_for_large_matrices", "muon_with_param_groups", "shampoo", "adafactor"),
        *(
            "global_norm_optimizer",
            "sam_by_closure",
            "lbfgs",
            "complex_parameters",
            "sparse_gradients",
            "sparse_gradients_of_a_function",
        ),
        *("frozen_mid_run", "pruned_while_training", "model_pruning_callback", "gradients_zeroed_in_hook"),
        *(
            "loss_backward_called_directly",
            "pipeline_split_backward",
            "gradient_surgery",
            "gradients_set_without_backward",
        ),
        *("optimizer_state_read", "optimizer_state_changed", "backward_error_caught"),
        *("optimizer_created_in_hook", "optimizer_outside_lightning", "training_without_optimizer"),
        *("optimizer_replaced", "trainer_optimizers_assigned", "wrapper_optimizer", "keyword_only_closure"),
    ),
)
_STAGE_2 = replace(_STAGE_1, shards_gradients=True)
_STAGE_3 = replace(
    _STAGE_2,
    shards_parameters=True,
    refuses=(
        *_STAGE_2.refuses,
        # Ranks cannot gather different layers. Layers below `persistence_threshold` are replicated, so ranks
        # may use different ones.
        *(
            "different_expert_per_rank",
            "experts_swap_each_batch",
            "different_expert_per_rank_while_accumulating",
            "layer_used_by_one_rank",
        ),
        *("experts_in_module_list", "experts_of_different_shapes", "head_per_task", "branch_per_sample"),
        *("skipped_blocks", "gradient_penalty", "two_backward_passes", "autograd_grad_of_weight"),
        *("weights_read_on_rank_zero", "reentrant_checkpointing_on_rank_zero"),
    ),
)


def _spec(
    name: str, description: str, use_when: str, *, capabilities: Capabilities, **init_params: object
) -> StrategySpec:
    return StrategySpec(
        name=name,
        target="nnx_deepspeed.backend:DeepSpeedBackend",
        options="nnx_deepspeed.options:DeepSpeedOptions",
        memory=f"nnx_deepspeed.memory:{'Submodule' if init_params['stage'] == 3 else 'Partition'}Memory",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/deepspeed.md",
        capabilities=capabilities,
        option_of="nnx_deepspeed_3" if "offload_parameters" in init_params else "",
        init_params=init_params,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the ZeRO stages."""
    return [
        _spec(
            "nnx_deepspeed_1",
            "ZeRO 1: partitioned optimizer state",
            "you depend on DeepSpeed and only the optimizer state does not fit",
            capabilities=_STAGE_1,
            stage=1,
        ),
        _spec(
            "nnx_deepspeed_2",
            "ZeRO 2: partitioned optimizer state and gradients",
            "you depend on DeepSpeed and gradients do not fit either",
            capabilities=_STAGE_2,
            stage=2,
        ),
        _spec(
            "nnx_deepspeed_3",
            "ZeRO 3: partitioned optimizer, gradients, parameters",
            "you depend on DeepSpeed and the model does not fit one device",
            capabilities=_STAGE_3,
            stage=3,
        ),
        _spec(
            "nnx_deepspeed_3_cpu",
            "ZeRO 3 with states in host memory",
            "you depend on DeepSpeed and the partitioned states do not fit the devices",
            capabilities=replace(_STAGE_3, offload=True),
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
        ),
    ]


@hookimpl
def nnx_checkpoint_formats() -> list[CheckpointFormatSpec]:
    """Return the format of the directories that DeepSpeed saves."""
    return [
        CheckpointFormatSpec(
            "deepspeed",
            "nnx_deepspeed.checkpoints:DeepSpeed",
            description="DeepSpeed ZeRO 1, 2, 3 directory; read only",
        )
    ]
