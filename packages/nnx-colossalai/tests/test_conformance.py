"""The colossalai strategies keep the guarantees of a strategy, with chunks in all tiers at once.

They are one backend with different options. So checks that do not depend on these run once, under the mix
of `MIXED`. The modules of the checks are far smaller than real layers, so `min_num_params` makes
their blocks chunks. Checkpoints are in `tests/test_resume_matrix.py` and `acceptance/test_resume.py`; `nnx
conformance NAME` runs all checks.
"""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance

UNITS = {"min_num_params": 100}
STREAMED = {"min_num_params": 1, "placement_policy": "streamed"}
MIXED = {**UNITS, "offload_fraction": 0.6, "stream_fraction": 0.3}


@pytest.mark.quick(
    checks=(
        *("parameter_groups", "manual_accumulation_no_sync", "several_optimizers_clipped"),
        *("losses_float64", "clip_by_value", "shards_parameters", "precision_64_true"),
        *("precision_bf16_mixed", "evaluation_after_fit", "validation_sees_current_weights"),
        *(
            "smaller_last_batch",
            "evaluation_batch_size_differs",
            "non_contiguous_parameters",
            "tied_parameters",
        ),
        *("partly_frozen_layers", "nested_containers", "parametrized_layers", "user_hooks"),
        *(
            "buffers_in_validation",
            "unseeded_ranks_start_equal",
            "optimizer_created_in_init",
            "names_after_training",
        ),
        *("hooks_on_submodules", "deepcopy_after_training", "ema_by_name", "ema_weight_averaging"),
        *("base_finetuning", "fabric_module"),
    ),
)
class TestColossalAI(StrategyConformance):
    strategy = "colossalai"
    options = MIXED
    only = ("numbers", "stages", "models", "lightning_api")


@pytest.mark.full
class TestColossalAIHabits(StrategyConformance):
    """User patterns with ranks and with attributes of parameters; FSDP2's tests run the others."""

    strategy = "colossalai"
    options = STREAMED
    only = (
        *(
            "gradient_hooks",
            "weight_data_assigned",
            "model_pruning_callback",
            "parametrization_with_parameters",
            "functional_call",
        ),
    )


@pytest.mark.quick(checks=("layer_used_by_one_rank",))
class TestColossalAIBranches(StrategyConformance):
    """Layers that ranks choose between are no chunks."""

    strategy = "colossalai"
    options = {**STREAMED, "by_choice": ["left", "right"]}  # noqa: RUF012
    only = ("different_expert_per_rank", "layer_used_by_one_rank")


@pytest.mark.full  # its units are those of FSDP2
class TestColossalAIListedExperts(StrategyConformance):
    strategy = "colossalai"
    options = {**STREAMED, "by_choice": ["listed"]}  # noqa: RUF012
    only = ("experts_in_module_list",)


class TestColossalAIHeads(StrategyConformance):
    strategy = "colossalai"
    options = {**STREAMED, "by_choice": ["heads"]}  # noqa: RUF012
    only = ("head_per_task",)


@pytest.mark.full  # its units are those of FSDP2
class TestColossalAISkippedBlocks(StrategyConformance):
    strategy = "colossalai"
    options = {**STREAMED, "by_choice": ["blocks"]}  # noqa: RUF012
    only = ("skipped_blocks",)


@pytest.mark.quick(checks=("manual_optimization", "precision_16_true"))
class TestColossalAICpu(StrategyConformance):
    strategy = "colossalai_cpu"
    options = UNITS
    only = ("numbers",)


@pytest.mark.quick(checks=("large_layers", "synchronized_batch_norm"))
class TestColossalAICuda(StrategyConformance):
    strategy = "colossalai_cuda"
    options = UNITS
    only = ("models",)


@pytest.mark.quick(
    checks=("accumulation", "precision_64_true", "ties_survive_training", "parametrized_layers")
)
class TestColossalAIAlone(StrategyConformance):
    """One rank, which has the engine for a single rank."""

    strategy = "colossalai"
    options = MIXED
    one_rank = True
    only = (
        *(
            "accumulation",
            "clip_by_norm",
            "parameter_groups",
            "parameter_group_added",
            "closure_called_twice",
        ),
        *("manual_optimization", "manual_closure", "manual_accumulation", "forward_without_backward"),
        *("several_optimizers_clipped", "several_optimizers_toggled", "submodules_called_directly"),
        *("precision_64_true", "precision_bf16_true", "precision_16_mixed", "precision_bf16_mixed"),
        *("ties_survive_training", "layers_called_twice", "parametrized_layers", "activation_checkpointing"),
    )
