"""Every FSDP2 strategy keeps the guarantees of a strategy.

Modules of the checks are far smaller than real units, so `min_num_params` makes their blocks units. The
strategies are one backend with different options: checks that do not depend on these run once. The
checkpoints are in `tests/test_resume_matrix.py`.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance
from nnx_conformance.runner import select_checks

UNITS = {"min_num_params": 100}
LISTED = ("experts_in_module_list", "experts_of_different_shapes")
SKIPPED = ("skipped_blocks",)


@pytest.mark.quick(
    checks=(
        *(
            "adamw",
            "parameter_group_added",
            "manual_closure",
            "manual_clipping",
            "submodules_called_directly",
        ),
        *("accumulation", "gradients_zeroed_in_place", "shards_optimizer", "precision_bf16_true"),
        *(
            "clip_after_unscaling",
            "fit_again_with_new_trainer",
            "validation_while_gradients_accumulate",
            "batch_size_differs_by_rank",
        ),
        *("scalar_parameters", "quantized_parameters", "ties_survive_training", "parameters_used_sometimes"),
        *("recurrent_layers", "activation_checkpointing", "dropout_is_reproducible", "batch_norm"),
        *("empty_init", "wrap_shards_layers", "submodules_keep_identity"),
        *("plain_parameters_after_training", "state_dict_after_training", "gradient_norms_by_name"),
        *(
            "freezing_by_name",
            "distributed_sampler_kwargs",
            "optimizer_state_resumes",
            "two_optimizers_resume",
        ),
        *("resume_from_ddp", "values_in_the_checkpoint"),
        *("state_dict_saved_on_rank_zero", "load_state_dict_override", "rank_local_state"),
        *("resume_at_node_counts", "node_and_local_ranks"),
    ),
    groups=(
        "user_patterns.backward",
        "user_patterns.optimizers",
        "user_patterns.writes_per_rank",
        "lifecycle",
    ),
)
class TestFsdpAuto(StrategyConformance):
    """The checks that do not need `by_choice`, which the classes below set."""

    strategy = "fsdp_auto"
    options = UNITS
    only = tuple(check.name for check in select_checks() if check.name not in LISTED + SKIPPED)


@pytest.mark.full  # as `test_agreement.py`
class TestFsdpAutoListedExperts(StrategyConformance):
    """The experts would be units, which ranks call in another order."""

    strategy = "fsdp_auto"
    options = {**UNITS, "by_choice": ["listed"]}  # noqa: RUF012
    only = LISTED


@pytest.mark.full  # as `test_agreement.py`
class TestFsdpAutoSkippedBlocks(StrategyConformance):
    """The blocks would be units, and each rank skips another one."""

    strategy = "fsdp_auto"
    options = {**UNITS, "by_choice": ["blocks"]}  # noqa: RUF012
    only = SKIPPED


@pytest.mark.quick(checks=("parameters_used_sometimes", "batch_norm"))
class TestFsdpManual(StrategyConformance):
    """The units are the user's, or the module as a whole; the strategy treats modules differently."""

    strategy = "fsdp_manual"
    only = ("models", "losses_float64", "accumulation", "clip_by_norm", "several_optimizers")


@pytest.mark.quick(checks=("sgd_momentum", "scheduler_by_group", "nested_batches"))
class TestFsdpOffload(StrategyConformance):
    """Parameters, gradients and moments are elsewhere: it differs in both."""

    strategy = "fsdp_offload"
    options = UNITS
    only = ("numbers", "models")


@pytest.mark.quick(checks=("parameter_groups", "shards_parameters"))
class TestFsdpHybrid(StrategyConformance):
    """It shards the same units over part of the ranks: it differs in how gradients are summed."""

    strategy = "fsdp_hybrid"
    options = UNITS
    only = ("numbers", "tied_parameters", "mixed_dtypes", "batch_norm", "built_on_meta_in_configure_model")
