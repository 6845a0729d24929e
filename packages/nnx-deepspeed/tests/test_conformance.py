"""The DeepSpeed strategies keep the promises of a strategy.

Modules of the checks are far smaller than real ones, so stage 3 keeps no parameter whole. What does not
depend on the stage is tried once, under stage 3; `nnx conformance NAME` tries everything. Checkpoints are in
`test_resume.py`.
"""

from __future__ import annotations

import pytest

from nnx.testing import StrategyConformance

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PARTS = {"persistence_threshold": 0}
OF_THE_STAGE = (
    *("accumulation", "clip_by_norm", "clip_by_value", "parameter_groups", "manual_accumulation"),
    *("shards_gradients", "shards_optimizer", "precision_bf16_mixed", "precision_16_mixed"),
    *("uneven_dimensions", "scalar_parameters", "empty_parameters", "strided_parameters", "ties_last"),
    *("frozen_parameters", "average_by_name", "weight_averaging", "nothing_left_on_the_module"),
)


class TestStage3(StrategyConformance):
    strategy = "nnx_deepspeed_3"
    options = PARTS
    only = (
        "numbers",
        "structure",
        "names",
        "no_tensors",
        "no_survivors",
        "no_files",
        "undeclared_precisions",
    )


class TestStage1(StrategyConformance):
    strategy = "nnx_deepspeed_1"
    only = OF_THE_STAGE


class TestStage2(StrategyConformance):
    strategy = "nnx_deepspeed_2"
    only = OF_THE_STAGE


class TestStage3OnTheHost(StrategyConformance):
    strategy = "nnx_deepspeed_3_cpu"
    options = PARTS
    only = OF_THE_STAGE
