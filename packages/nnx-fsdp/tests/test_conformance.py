"""Every FSDP2 strategy keeps the promises of a strategy.

Modules of the checks are far smaller than real units, so `min_num_params` makes their blocks units. The
strategies are one backend with different options: what does not depend on these is tried once, and their
checkpoints are in `tests/test_resume_matrix.py`.
"""

from __future__ import annotations

from nnx.testing import StrategyConformance

UNITS = {"min_num_params": 100}
OF_THE_ENGINE = ("numbers", "structure")


class TestFsdpAuto(StrategyConformance):
    strategy = "fsdp_auto"
    options = UNITS


class TestFsdpManual(StrategyConformance):
    strategy = "fsdp_manual"
    only = OF_THE_ENGINE


class TestFsdpOffload(StrategyConformance):
    strategy = "fsdp_offload"
    options = UNITS
    only = OF_THE_ENGINE


class TestFsdpHybrid(StrategyConformance):
    strategy = "fsdp_hybrid"
    options = UNITS
    only = OF_THE_ENGINE
