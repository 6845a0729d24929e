"""A peer alone keeps the promises of a strategy on one rank; `test_swarm.py` has several peers.

A target of one sample lets it step after each batch. Checks of several ranks, and those whose module has a
scheduler in `configure_optimizers`, which is refused, do not apply.
"""

from __future__ import annotations

import pytest

pytest.importorskip("nnx_hivemind._hivemind_compat", reason="hivemind is not installed")

from nnx_conformance import StrategyConformance


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestHivemind(StrategyConformance):
    strategy = "hivemind"
    options = {  # noqa: RUF012
        "target_batch_size": 1,
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    }
    one_rank = True
    only = (
        *("converges", "losses_float32", "adamw", "sgd_momentum", "parameter_groups", "clip_by_norm"),
        *("manual_optimization", "manual_clipping", "accumulation", "frozen_parameters"),
        *("fabric_loop", "fabric_checkpoint", "no_leftover_threads", "no_leftover_files"),
        *("no_leftover_process_groups", "signal_handlers_restored", "strategy_can_be_pickled"),
        *("spec_has_description", "options_documented", "options_match_engine", "spec_is_plain_data"),
        *("refuses_known_checks", "unknown_option", "invalid_option_values", "undeclared_precisions"),
        *("keyboard_interrupt", "error_in_training_step"),
    )
