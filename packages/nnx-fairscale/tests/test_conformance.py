"""Every fairscale strategy keeps the promises of a strategy, the FSDP with units smaller than its default."""

from __future__ import annotations

import pytest

from nnx.testing import StrategyConformance

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
BY_PARAMETER = {**UNITS, "flatten_parameters": False}


class TestFairscaleFsdp(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = UNITS


class TestFairscaleFsdpByParameter(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = BY_PARAMETER
    only = ("numbers",)


class TestFairscaleOss(StrategyConformance):
    strategy = "fairscale_oss"


class TestFairscaleSharded(StrategyConformance):
    strategy = "fairscale_sharded"
