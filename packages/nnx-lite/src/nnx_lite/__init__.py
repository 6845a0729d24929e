"""Run LightningLite scripts on today's Fabric, with every strategy that nnx knows.

Old scripts change one line: ``from pytorch_lightning.lite import LightningLite`` becomes ``from nnx_lite
import LightningLite``. `DeepSpeedPlugin` is here because LightningLite called strategies plugins.
"""

from nnx_lite.copies import fabric_module
from nnx_lite.lite import Lite

__all__ = ["DeepSpeedPlugin", "LightningLite", "Lite"]

LightningLite = Lite
DeepSpeedPlugin = fabric_module("strategies").DeepSpeedStrategy
