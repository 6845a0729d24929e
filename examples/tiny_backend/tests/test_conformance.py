"""The test suite of a plugin: one class for each of its strategies.

The markers select the checks of this repository's default run. Another plugin's suite needs none.
"""

import pytest

from nnx_conformance import StrategyConformance


@pytest.mark.quick(
    checks=(
        *("parameter_groups_edited", "manual_optimization", "forward_without_backward"),
        *(
            "several_optimizers_toggled",
            "ranks_start_with_equal_weights",
            "clip_with_accumulation",
            "shards_gradients",
        ),
        *("precision_16_true", "overflow_on_one_rank", "evaluation_with_the_same_trainer"),
        *("evaluation_before_fit", "evaluation_computes_no_gradients"),
        *("validation_keeps_training_unchanged", "last_batch_of_one_sample", "uneven_dimensions"),
        *("mixed_dtypes", "tied_repeated_layers", "unused_parameters", "embeddings_and_convolutions"),
        *(
            "generic_lightning_module",
            "dropout_differs_by_rank",
            "buffers_in_test_after_fit",
            "built_in_configure_model",
        ),
        *(
            "wrap_in_configure_model",
            "classes_during_training",
            "classes_after_training",
            "pickle_after_training",
        ),
        *("weight_decay_by_name", "stochastic_weight_averaging", "backbone_finetuning"),
        *(
            "losses_across_nodes",
            "spec_has_description",
            "spec_is_plain_data",
            "fabric_loop",
            "fabric_checkpoint",
        ),
        *(
            "error_on_one_rank",
            "error_before_first_forward",
            "no_leftover_process_groups",
            "torch_settings_restored",
        ),
        "no_leftover_tensors",
    ),
    groups=("checkpoints.resuming", "checkpoints.contents"),
    adapter=True,
)
class TestTiny(StrategyConformance):
    strategy = "tiny"


@pytest.mark.quick(
    checks=(
        *("parameter_groups_edited", "manual_accumulation", "several_optimizers_toggled", "clip_by_norm"),
        *("shards_gradients", "precision_16_mixed", "parameters_keep_identity", "pickle_after_training"),
        *("weight_averaging", "backbone_finetuning", "resume_under_ddp", "options_match_engine"),
        *("error_on_one_rank", "two_trainers"),
    ),
    adapter=True,
)
class TestTinyLightning(StrategyConformance):
    """The checks of this strategy's own code: steps, collectives, checkpoints.

    The arithmetic is that of `tiny`. Modules and stages are Lightning's own code, which nnx-core tests
    with `ddp`. `nnx conformance tiny_lightning` runs all checks.
    """

    strategy = "tiny_lightning"
    only = (
        "numbers",
        "lightning_api",
        *("weights_resume", "optimizer_state_resumes", "two_optimizers_resume", "resume_and_save_again"),
        *("resume_at_world_sizes", "resume_from_ddp", "resume_under_ddp", "checksums_verify"),
        *(
            "weights_only_has_no_optimizer",
            "load_hook_renames",
            "model_checkpoint_keeps_best",
            "missing_checkpoint",
        ),
        *(
            "two_trainers",
            "strategy_can_be_pickled",
            "error_in_training_step",
            "error_on_one_rank",
            "no_leftover_process_groups",
        ),
        *("listing_imports_no_torch", "spec_has_description", "options_match_engine", "spec_is_plain_data"),
    )
