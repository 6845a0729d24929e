"""The nnscaler strategies keep the guarantees of a strategy.

They are one backend with different options. So checks that do not depend on these run once, under
`nnscaler_tp`, which splits everything that can be split. Their checkpoints are in
`tests/test_resume_matrix.py`; `nnx conformance NAME` runs all checks.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance


@pytest.mark.quick(
    checks=(
        *("sgd_momentum", "closure_called_twice", "manual_accumulation", "several_optimizers"),
        *("losses_float32", "clip_by_norm", "scheduler_by_group", "precision_16_mixed"),
        "batch_size_changes",
        *("empty_parameters", "large_layers", "frozen_parameters", "layers_called_twice", "attention_layers"),
        *("nested_batches", "buffers_keep_updates", "synchronized_batch_norm"),
        *("built_on_meta_in_configure_model", "names_during_training", "parameters_keep_identity"),
        *("no_leftover_attributes", "plain_pytorch_after_training", "weight_averaging"),
        *("unfreezing_by_name", "fabric_names"),
    ),
)
class TestNnScalerTp(StrategyConformance):
    strategy = "nnscaler_tp"
    only = (
        *("numbers", "stages", "models", "lightning_api"),
        *(
            "iterable_dataset_split_by_rank",
            "shuffle_seeded_by_rank",
            "contrastive_loss",
            "contrastive_loss_with_global_rank",
        ),
        *("contrastive_loss_with_data_rank", "loss_scaled_by_world_size", "loss_scaled_by_data_world_size"),
        *("samples_counted_once", "complex_parameters", "sparse_gradients"),
        *("frozen_mid_run", "backward_override", "weights_read_on_rank_zero"),
    )


@pytest.mark.quick(
    checks=(
        *(
            "sgd_momentum",
            "losses_float32",
            "precision_16_mixed",
            "batch_size_changes",
            "layers_called_twice",
        ),
        "synchronized_batch_norm",
    ),
)
class TestNnScalerPp(StrategyConformance):
    strategy = "nnscaler_pp"
    only = (
        *("numbers", "stages", "models", "weights_read_between_steps", "weight_norms_logged"),
        *("module_freed", "no_leftover_tensors", "step_tensors_freed"),
    )


@pytest.mark.quick(checks=("bias_written_per_rank",))
class TestNnScalerPpBetweenStages(StrategyConformance):
    """One rank writes into a parameter of another stage, or drops its loss."""

    strategy = "nnscaler_pp"
    only = ("bias_written_per_rank", "zeroed_loss_on_one_rank")


@pytest.mark.quick(checks=("parameter_groups_edited", "shards_gradients"))
class TestNnScalerDeduped(StrategyConformance):
    strategy = "nnscaler_deduped"
    only = ("numbers",)


@pytest.mark.quick(
    checks=(*("closure_called_twice", "precision_32_true", "empty_parameters", "buffers_keep_updates"),),
)
class TestNnScalerZero(StrategyConformance):
    strategy = "nnscaler_zero"
    only = ("numbers", "models", "gradients_read_on_rank_zero")


@pytest.mark.quick(checks=("accumulation", "clip_after_unscaling"))
class TestNnScalerDp(StrategyConformance):
    """Plain replicas: the sum of their gradients. `acceptance` compares them with ddp, bit for bit."""

    strategy = "nnscaler_dp"
    only = (
        *(
            "losses_float32",
            "losses_float64",
            "ranks_start_with_equal_weights",
            "accumulation",
            "clip_by_norm",
            "clip_by_value",
        ),
        *(
            "clip_with_accumulation",
            "parameter_groups",
            "closure_called_twice",
            "manual_accumulation",
            "manual_clipping",
        ),
        *("several_optimizers_clipped", "several_optimizers_toggled", "submodules_called_directly"),
        *("precision_16_mixed", "precision_bf16_true", "overflow_on_one_rank", "clip_after_unscaling"),
    )
