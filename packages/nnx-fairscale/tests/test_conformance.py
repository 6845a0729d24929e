"""Every fairscale strategy keeps the promises of a strategy, the FSDP with units smaller than its default.

What does not depend on the engine is tried elsewhere, and checkpoints in `test_resume.py`; `nnx conformance
NAME` tries everything.
"""

from __future__ import annotations

import pytest

from nnx.testing import StrategyConformance

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
BY_PARAMETER = {**UNITS, "flatten_parameters": False}
OF_THE_GRADIENTS = (
    *("accumulation", "clip_by_norm", "clip_by_value", "clip_accumulated", "parameter_groups", "adamw"),
    *("parameter_group_added", "several_optimizers_clipped", "several_optimizers_toggled"),
    *("manual_closure", "manual_accumulation", "forward_without_backward", "gradients_zeroed_in_place"),
    *("precision_16_mixed", "precision_bf16_mixed", "overflow_on_one_rank"),
    *("shards_gradients", "shards_optimizer"),
    *("uneven_dimensions", "scalar_parameters", "empty_parameters", "strided_parameters", "ties_last"),
    *("mixed_dtypes", "frozen_parameters", "unused_parameters", "parameters_used_now_and_then"),
    *("recomputed_activations", "unequal_shares"),
)
OF_THE_MODULE = (
    *("fit_again", "validation_sees_current_weights", "validation_while_gradients_accumulate"),
    *("average_by_name", "gradient_norms_by_name", "weight_averaging"),
    *("freezing_by_name", "unfreezing_by_name", "backbone_finetuning"),
    *("parameters_stay", "plain_parameters_after_training", "nothing_left_on_the_module"),
    *("module_after_an_error", "no_tensors", "fabric_accumulation", "fabric_clipping_by_value"),
)


class TestFairscaleFsdp(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = UNITS
    only = ("numbers", "structure", *OF_THE_GRADIENTS, *OF_THE_MODULE)


class TestFairscaleFsdpByParameter(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = BY_PARAMETER
    only = OF_THE_GRADIENTS


class TestFairscaleOss(StrategyConformance):
    strategy = "fairscale_oss"
    only = (*OF_THE_GRADIENTS, *OF_THE_MODULE)


class TestFairscaleSharded(StrategyConformance):
    strategy = "fairscale_sharded"
    only = (*OF_THE_GRADIENTS, *OF_THE_MODULE)
