"""The nnscaler strategies keep the promises of a strategy.

They are one backend with different options, so what does not depend on these is tried once, under
`nnscaler_tp`, which splits whatever can be split. Their checkpoints are in `tests/test_resume_matrix.py`;
`nnx conformance NAME` tries everything.
"""

from __future__ import annotations

from nnx_conformance import StrategyConformance


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


class TestNnScalerPp(StrategyConformance):
    strategy = "nnscaler_pp"
    only = (
        *("numbers", "stages", "models", "weights_read_between_steps", "weight_norms_logged"),
        *("module_freed", "no_leftover_tensors", "step_tensors_freed"),
    )


class TestNnScalerPpBetweenStages(StrategyConformance):
    """One rank writes into a parameter of another stage, or drops its loss."""

    strategy = "nnscaler_pp"
    only = ("bias_written_per_rank", "zeroed_loss_on_one_rank")


class TestNnScalerDeduped(StrategyConformance):
    strategy = "nnscaler_deduped"
    only = ("numbers",)


class TestNnScalerZero(StrategyConformance):
    strategy = "nnscaler_zero"
    only = ("numbers", "models", "gradients_read_on_rank_zero")


class TestNnScalerDp(StrategyConformance):
    """Plain replicas: what adds their gradients up. `acceptance` holds them to ddp's bits."""

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
