"""Every FSDP2 strategy keeps the promises of a strategy.

Modules of the checks are far smaller than real units, so `min_num_params` makes their blocks units.
"""

from __future__ import annotations

from nnx.testing import StrategyConformance

UNITS = {"min_num_params": 100}


class TestFsdpAuto(StrategyConformance):
    strategy = "fsdp_auto"
    options = UNITS


class TestFsdpManual(StrategyConformance):
    strategy = "fsdp_manual"


class TestFsdpOffload(StrategyConformance):
    strategy = "fsdp_offload"
    options = UNITS


class TestFsdpHybrid(StrategyConformance):
    strategy = "fsdp_hybrid"
    options = UNITS
