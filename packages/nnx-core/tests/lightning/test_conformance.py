"""Lightning's own `ddp`, the reference of what users are used to, keeps the promises it can."""

from __future__ import annotations

from nnx_conformance import StrategyConformance


class TestDdp(StrategyConformance):
    strategy = "ddp"
