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
        "names",
        *("weights_resume", "optimizer_state_resumes", "two_optimizers_resume", "resume_and_save_again"),
        *("resume_at_world_sizes", "resume_from_ddp", "resume_under_ddp", "checkpoint_is_whole"),
        *("weights_only_has_no_optimizer", "load_hook_renames", "keeps_the_best", "missing_checkpoint"),
        *("two_trainers", "pickled_object", "error_in_step", "error_on_one_rank", "no_process_groups"),
        *("light_plugin", "described", "declared_options", "portable_spec"),
    )
