"""Lightning's own `ddp`, the reference for users, keeps all guarantees that it can."""

from __future__ import annotations

import pytest

from nnx_conformance import StrategyConformance


@pytest.mark.quick(
    checks=(
        *("parameter_group_added", "manual_accumulation_no_sync", "submodules_called_directly"),
        *(
            "clip_by_value",
            "shards_optimizer",
            "precision_bf16_mixed",
            "fit_again_with_new_trainer",
            "smaller_last_batch",
        ),
        *("scalar_parameters", "tied_parameters", "parameters_used_sometimes", "parametrized_layers"),
        *("dropout_is_reproducible", "unseeded_ranks_start_equal", "wrap_shards_layers"),
        *(
            "hooks_on_submodules",
            "state_dict_after_training",
            "ema_weight_averaging",
            "distributed_sampler_kwargs",
        ),
        *("two_optimizers_resume", "names_in_the_checkpoint", "node_and_local_ranks", "refuses_known_checks"),
        *("fabric_clipping_by_value", "backward_error_without_zero_grad", "two_strategies_in_one_process"),
        "signal_handlers_restored",
    ),
)
class TestDdp(StrategyConformance):
    strategy = "ddp"
