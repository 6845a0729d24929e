"""Every fairscale strategy keeps the promises of a strategy, the FSDP with units smaller than its default.

What does not depend on the engine is tried elsewhere, and checkpoints in `test_resume.py`; `nnx conformance
NAME` tries everything.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
OF_ANY_SIZE = {"min_num_params": 1}
OF_EVERY_ENGINE = (
    *("accumulation", "clip_by_value", "clip_accumulated", "parameter_group_added", "manual_accumulation"),
    *("several_optimizers_toggled", "precision_16_mixed", "overflow_on_one_rank", "mixed_dtypes"),
    *("parameters_used_now_and_then", "strided_parameters", "unfreezing_by_name", "shards_optimizer"),
    *("plain_parameters_after_training", "no_survivors"),
)
OF_UNITS = (
    *("clip_by_norm", "parameter_groups", "several_optimizers_clipped", "forward_without_backward"),
    *("gradients_zeroed_in_place", "manual_closure", "precision_bf16_mixed", "shards_parameters"),
    *("shards_gradients", "ties_last", "layers_used_twice", "parametrized_layers", "recurrent_layers"),
    *("recomputed_activations", "scalar_parameters", "empty_parameters", "uneven_dimensions"),
    *("frozen_parameters", "wrapped_layers", "wrapped_layers_are_sharded", "average_by_name"),
    *("built_on_meta_in_configure_model", "validation_while_gradients_accumulate", "weight_averaging"),
    *("fit_again", "module_after_an_error", "fabric_accumulation", "model_summary"),
)


class TestFairscaleFsdp(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = UNITS
    only = (*OF_EVERY_ENGINE, *OF_UNITS)


class TestFairscaleFsdpHabits(StrategyConformance):
    """What is attached to parameters, or assigned to them."""

    strategy = "fairscale_fsdp"
    options = OF_ANY_SIZE
    only = (
        *("gradient_hooks", "post_accumulate_hooks", "attributes_of_parameters", "assigned_targets"),
        *("assigned_weights", "written_weights", "reinitialized_layers", "pruned_layers", "functional_call"),
        "parametrized",
    )


class TestFairscaleFsdpWithoutUnits(StrategyConformance):
    """One flat parameter holds the model, which a backward inside the backward has parts of only."""

    strategy = "fairscale_fsdp"
    only = (
        *("inner_backward", "reentrant_checkpoints", "reentrant_checkpoints_while_accumulating"),
        *("reentrant_checkpoints_on_rank_zero", "loss_dropped_on_one_rank", "layer_called_on_rank_zero"),
        "sample_drawn_before_training",
    )


class TestFairscaleOss(StrategyConformance):
    strategy = "fairscale_oss"
    only = OF_EVERY_ENGINE


class TestFairscaleSharded(StrategyConformance):
    strategy = "fairscale_sharded"
    only = (
        *OF_EVERY_ENGINE,
        *("gradients_zeroed_in_place", "several_optimizers_clipped", "shards_gradients"),
        *("gradient_norms_by_name", "validation_while_gradients_accumulate"),
        *("clipped_by_hand", "clipped_in_manual_optimization", "configured_clipping", "scaled_gradients"),
        *("zeroed_gradients", "assigned_gradients", "centralized_gradients", "logged_gradient_norms"),
        *("skipped_large_gradients", "gradients_in_a_callback"),
    )
