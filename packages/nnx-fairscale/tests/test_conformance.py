"""Every fairscale strategy keeps the guarantees of a strategy, FSDP with units smaller than its default.

Checks that do not depend on the engine run elsewhere, and checkpoints are in `test_resume.py`; `nnx
conformance NAME` runs all checks.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
OF_ANY_SIZE = {"min_num_params": 1}
OF_EVERY_ENGINE = (
    *(
        "accumulation",
        "clip_by_value",
        "clip_with_accumulation",
        "parameter_group_added",
        "manual_accumulation",
    ),
    *("several_optimizers_toggled", "precision_16_mixed", "overflow_on_one_rank", "mixed_dtypes"),
    *("parameters_used_sometimes", "non_contiguous_parameters", "unfreezing_by_name", "shards_optimizer"),
    *("plain_parameters_after_training", "module_freed"),
)
OF_UNITS = (
    *("clip_by_norm", "parameter_groups", "several_optimizers_clipped", "forward_without_backward"),
    *("gradients_zeroed_in_place", "manual_closure", "precision_bf16_mixed", "shards_parameters"),
    *(
        "shards_gradients",
        "ties_survive_training",
        "layers_called_twice",
        "parametrized_layers",
        "recurrent_layers",
    ),
    *("activation_checkpointing", "scalar_parameters", "empty_parameters", "uneven_dimensions"),
    *("frozen_parameters", "wrap_in_configure_model", "wrap_shards_layers", "ema_by_name"),
    *("built_on_meta_in_configure_model", "validation_while_gradients_accumulate", "weight_averaging"),
    *("fit_again_with_new_trainer", "module_complete_after_error", "fabric_accumulation", "model_summary"),
)


@pytest.mark.quick(
    checks=(
        *(
            "manual_closure",
            "gradients_zeroed_in_place",
            "fit_again_with_new_trainer",
            "parameters_used_sometimes",
        ),
        *("activation_checkpointing", "wrap_shards_layers", "plain_parameters_after_training"),
        "fabric_accumulation",
    ),
)
class TestFairscaleFsdp(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = UNITS
    only = (*OF_EVERY_ENGINE, *OF_UNITS)


@pytest.mark.full
class TestFairscaleFsdpHabits(StrategyConformance):
    """User patterns with attributes of parameters and with assignments to them."""

    strategy = "fairscale_fsdp"
    options = OF_ANY_SIZE
    only = (
        *("gradient_hooks", "post_accumulate_grad_hooks", "parameter_attributes", "target_network_assigned"),
        *(
            "weight_data_assigned",
            "weights_written_in_hooks",
            "reinitialized_layers",
            "pruned_layers",
            "functional_call",
        ),
        "parametrization_with_parameters",
    )


@pytest.mark.quick(
    checks=("backward_inside_backward", "reentrant_checkpointing_on_rank_zero", "zeroed_loss_on_one_rank")
)
class TestFairscaleFsdpWithoutUnits(StrategyConformance):
    """One flat parameter holds the model, which a backward inside the backward has parts of only."""

    strategy = "fairscale_fsdp"
    only = (
        *(
            "backward_inside_backward",
            "reentrant_checkpointing",
            "reentrant_checkpointing_while_accumulating",
        ),
        *("reentrant_checkpointing_on_rank_zero", "zeroed_loss_on_one_rank", "layer_called_on_rank_zero"),
        "forward_on_rank_zero_before_training",
    )


@pytest.mark.quick(checks=("accumulation", "plain_parameters_after_training"))
class TestFairscaleOss(StrategyConformance):
    strategy = "fairscale_oss"
    only = OF_EVERY_ENGINE


@pytest.mark.quick(checks=("clip_with_accumulation", "shards_optimizer", "precision_16_mixed"))
class TestFairscaleSharded(StrategyConformance):
    strategy = "fairscale_sharded"
    only = (
        *OF_EVERY_ENGINE,
        *("gradients_zeroed_in_place", "several_optimizers_clipped", "shards_gradients"),
        *("gradient_norms_by_name", "validation_while_gradients_accumulate"),
        *(
            "clip_grad_norm_in_hook",
            "clip_grad_norm_in_manual_optimization",
            "configure_gradient_clipping",
            "gradients_scaled_in_hook",
        ),
        *(
            "gradients_zeroed_in_hook",
            "gradients_assigned_in_hook",
            "gradient_centralization",
            "gradient_norms_logged",
        ),
        *("large_gradients_skipped", "gradients_changed_in_callback"),
    )
