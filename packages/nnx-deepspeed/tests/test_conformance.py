"""The DeepSpeed strategies keep the promises of a strategy.

Modules of the checks are far smaller than real ones, so stage 3 keeps no parameter whole. What the core does
is not tried again here: each stage is tried with what reaches its own code. `nnx conformance NAME` tries
everything. Checkpoints are in `test_resume.py`.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PARTS = {"persistence_threshold": 0}


class TestStage3(StrategyConformance):
    strategy = "nnx_deepspeed_3"
    options = PARTS
    only = (
        *("losses_float32", "ranks_start_alike", "accumulation", "accumulation_cut_short", "clip_by_norm"),
        *("clip_accumulated", "gradients_zeroed_in_place", "parameter_groups_edited", "overflow_on_one_rank"),
        *("manual_accumulation_unsynchronized", "precision_bf16_mixed", "shards_parameters"),
        *("uneven_dimensions", "scalar_parameters", "empty_parameters", "strided_parameters", "ties_last"),
        *("frozen_parameters", "partly_frozen_layers", "layers_used_twice", "recurrent_layers"),
        *("parametrized_layers", "generic_root", "recomputed_activations", "optimizer_made_early"),
        *("built_without_values", "buffers_in_validation", "validation_sees_current_weights", "fit_again"),
        *("average_by_name", "weight_averaging", "nothing_left_on_the_module", "module_after_an_error"),
        *("fabric_loop", "fabric_checkpoint", "no_tensors", "no_files", "undeclared_precisions"),
        *("experts_in_a_list", "clipped_by_hand_while_accumulating", "sam_in_manual_optimization"),
        *("reinitialized_layers", "functional_call", "weight_as_a_number", "weights_read_between_steps"),
        *("parameters_used_now_and_then", "weights_read_on_rank_zero"),
        *("loss_dropped_on_one_rank", "layer_called_on_rank_zero"),
    )


class TestStage1(StrategyConformance):
    strategy = "nnx_deepspeed_1"
    only = (
        *("clip_by_norm", "parameter_groups", "precision_bf16_mixed", "shards_optimizer"),
        *("scalar_parameters", "ties_last", "weight_averaging", "nothing_left_on_the_module"),
        *("swapped_while_accumulating", "experts_of_any_shape", "gradients_in_manual_optimization"),
        *("parameters_used_now_and_then", "unused_parameters"),
    )


class TestStage2(StrategyConformance):
    strategy = "nnx_deepspeed_2"
    only = (
        *("accumulation", "clip_by_value", "parameter_groups", "overflow_on_one_rank", "shards_gradients"),
        *("precision_16_mixed", "precision_bf16_mixed", "uneven_dimensions", "empty_parameters"),
        *("frozen_parameters", "average_by_name", "fit_again", "fabric_loop"),
        *("swapped_experts", "experts_in_a_list", "clipped_by_hand", "assigned_weights", "lamb"),
    )


class TestStage2WithWrappedOptimizers(StrategyConformance):
    """DeepSpeed steps a copy of the optimizer, and what is wrapped kept the module's parameters."""

    strategy = "nnx_deepspeed_2"
    only = ("optimizer_that_wraps",)


class TestStage3OnTheHost(StrategyConformance):
    strategy = "nnx_deepspeed_3_cpu"
    options = PARTS
    only = (
        *("accumulation", "clip_by_norm", "precision_bf16_mixed", "uneven_dimensions"),
        *("weight_averaging", "fit_again", "nothing_left_on_the_module"),
    )
