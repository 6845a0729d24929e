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
        *("numbers", "stages", "structure", "names"),
        *("iterable_split_by_rank", "shuffled_by_rank", "contrastive_loss", "contrastive_loss_by_rank"),
        *("contrastive_loss_by_data_rank", "world_size_in_the_loss", "data_world_size_in_the_loss"),
        *("counted_samples", "complex_parameters", "sparse_gradients"),
        *("frozen_in_mid_run", "own_backward", "weights_read_on_rank_zero"),
    )


class TestNnScalerPp(StrategyConformance):
    strategy = "nnscaler_pp"
    only = (
        *("numbers", "stages", "structure", "weights_read_between_steps", "logged_weights"),
        *("no_survivors", "no_tensors", "no_tensors_of_steps"),
    )


class TestNnScalerPpBetweenStages(StrategyConformance):
    """One rank writes into a parameter of another stage, or drops its loss."""

    strategy = "nnscaler_pp"
    only = ("bias_written_by_ranks", "loss_dropped_on_one_rank")


class TestNnScalerDeduped(StrategyConformance):
    strategy = "nnscaler_deduped"
    only = ("numbers",)


class TestNnScalerZero(StrategyConformance):
    strategy = "nnscaler_zero"
    only = ("numbers", "structure", "gradients_read_on_rank_zero")


class TestNnScalerDp(StrategyConformance):
    """Plain replicas: what adds their gradients up. `acceptance` holds them to ddp's bits."""

    strategy = "nnscaler_dp"
    only = (
        *(
            "losses_float32",
            "losses_float64",
            "ranks_start_alike",
            "accumulation",
            "clip_by_norm",
            "clip_by_value",
        ),
        *(
            "clip_accumulated",
            "parameter_groups",
            "closure_called_twice",
            "manual_accumulation",
            "manual_clipping",
        ),
        *("several_optimizers_clipped", "several_optimizers_toggled", "parts_called_directly"),
        *("precision_16_mixed", "precision_bf16_true", "overflow_on_one_rank", "clip_unscaled"),
    )
