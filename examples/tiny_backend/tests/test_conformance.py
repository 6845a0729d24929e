"""What a plugin's own test suite needs: a class for each strategy that it provides."""

from nnx_conformance import StrategyConformance


class TestTiny(StrategyConformance):
    strategy = "tiny"


class TestTinyLightning(StrategyConformance):
    """The same arithmetic, so tried here is what this one has of its own: steps, collectives, checkpoints.

    How modules are treated and stages follow each other is Lightning's, which `ddp` is tried on in nnx-core's
    tests. `nnx conformance tiny_lightning` tries everything.
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
