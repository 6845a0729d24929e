"""The DeepSpeed strategies keep the guarantees of a strategy.

Modules of the checks are far smaller than real ones, so the options make stage 3 shard every parameter. The
checks of nnx_core's code are not repeated: each stage runs the checks that reach its own code. `nnx
conformance NAME` runs all checks. Checkpoints are in `test_resume.py`.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PARTS = {"persistence_threshold": 0}


@pytest.mark.quick(
    checks=(
        *("clip_by_norm", "overflow_on_one_rank", "validation_sees_current_weights", "parametrized_layers"),
        *("empty_init", "weight_averaging"),
    ),
)
class TestStage3(StrategyConformance):
    strategy = "nnx_deepspeed_3"
    options = PARTS
    only = (
        *(
            "losses_float32",
            "ranks_start_with_equal_weights",
            "accumulation",
            "accumulation_ends_with_epoch",
            "clip_by_norm",
        ),
        *(
            "clip_with_accumulation",
            "gradients_zeroed_in_place",
            "parameter_groups_edited",
            "overflow_on_one_rank",
        ),
        *("manual_accumulation_no_sync", "precision_bf16_mixed", "shards_parameters"),
        *(
            "uneven_dimensions",
            "scalar_parameters",
            "empty_parameters",
            "non_contiguous_parameters",
            "ties_survive_training",
        ),
        *("frozen_parameters", "partly_frozen_layers", "layers_called_twice", "recurrent_layers"),
        *(
            "parametrized_layers",
            "generic_lightning_module",
            "activation_checkpointing",
            "optimizer_created_in_init",
        ),
        *(
            "empty_init",
            "buffers_in_validation",
            "validation_sees_current_weights",
            "fit_again_with_new_trainer",
        ),
        *("ema_by_name", "weight_averaging", "no_leftover_attributes", "module_complete_after_error"),
        *(
            "fabric_loop",
            "fabric_checkpoint",
            "no_leftover_tensors",
            "no_leftover_files",
            "undeclared_precisions",
        ),
        *(
            "experts_in_module_list",
            "clip_grad_norm_in_hook_while_accumulating",
            "sam_in_manual_optimization",
        ),
        *("reinitialized_layers", "functional_call", "weight_as_python_number", "weights_read_between_steps"),
        *("parameters_used_sometimes", "weights_read_on_rank_zero"),
        *("zeroed_loss_on_one_rank", "layer_called_on_rank_zero"),
    )


@pytest.mark.quick(checks=("clip_by_norm",))
class TestStage1(StrategyConformance):
    strategy = "nnx_deepspeed_1"
    only = (
        *("clip_by_norm", "parameter_groups", "precision_bf16_mixed", "shards_optimizer"),
        *("scalar_parameters", "ties_survive_training", "weight_averaging", "no_leftover_attributes"),
        *(
            "different_expert_per_rank_while_accumulating",
            "experts_of_different_shapes",
            "gradients_changed_in_manual_optimization",
        ),
        *("parameters_used_sometimes", "unused_parameters"),
    )


@pytest.mark.quick(checks=("parameter_groups", "clip_by_value", "shards_gradients", "ema_by_name"))
class TestStage2(StrategyConformance):
    strategy = "nnx_deepspeed_2"
    only = (
        *("accumulation", "clip_by_value", "parameter_groups", "overflow_on_one_rank", "shards_gradients"),
        *("precision_16_mixed", "precision_bf16_mixed", "uneven_dimensions", "empty_parameters"),
        *("frozen_parameters", "ema_by_name", "fit_again_with_new_trainer", "fabric_loop"),
        *(
            "different_expert_per_rank",
            "experts_in_module_list",
            "clip_grad_norm_in_hook",
            "weight_data_assigned",
            "lamb",
        ),
    )


class TestStage2WithWrappedOptimizers(StrategyConformance):
    """DeepSpeed steps a copy of the optimizer, and the wrapped optimizer keeps the module's parameters."""

    strategy = "nnx_deepspeed_2"
    only = ("wrapper_optimizer",)


@pytest.mark.full
class TestStage3OnTheHost(StrategyConformance):
    strategy = "nnx_deepspeed_3_cpu"
    options = PARTS
    only = (
        *("accumulation", "clip_by_norm", "precision_bf16_mixed", "uneven_dimensions"),
        *("weight_averaging", "fit_again_with_new_trainer", "no_leftover_attributes"),
    )
