"""Every fairscale strategy keeps the promises of a strategy, the FSDP with units smaller than its default."""

from __future__ import annotations

from nnx.testing import StrategyConformance


class TestFairscaleFsdp(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = {"min_num_params": 100}


class TestFairscaleFsdpByParameter(StrategyConformance):
    strategy = "fairscale_fsdp"
    options = {"min_num_params": 100, "flatten_parameters": False}
    only = ("numbers",)


class TestFairscaleOss(StrategyConformance):
    strategy = "fairscale_oss"


class TestFairscaleSharded(StrategyConformance):
    strategy = "fairscale_sharded"
