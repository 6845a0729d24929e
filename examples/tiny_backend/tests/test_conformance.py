"""What a plugin's own test suite needs: a class for each strategy that it provides."""

from nnx.testing import StrategyConformance


class TestTiny(StrategyConformance):
    strategy = "tiny"


class TestTinyLightning(StrategyConformance):
    strategy = "tiny_lightning"
