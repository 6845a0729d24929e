"""The nnscaler strategies keep the promises of a strategy.

They are one backend with different options, so what does not depend on these is tried once, under
`nnscaler_tp`, which splits whatever can be split. Their checkpoints are in `tests/test_resume_matrix.py`;
`nnx conformance NAME` tries everything.
"""

from __future__ import annotations

from nnx.testing import StrategyConformance


class TestNnScalerTp(StrategyConformance):
    strategy = "nnscaler_tp"
    only = ("numbers", "stages", "structure", "names")


class TestNnScalerDeduped(StrategyConformance):
    strategy = "nnscaler_deduped"
    only = ("numbers",)


class TestNnScalerZero(StrategyConformance):
    strategy = "nnscaler_zero"
    only = ("numbers", "structure")


class TestNnScalerDp(StrategyConformance):
    strategy = "nnscaler_dp"
    only = ("numbers",)
