"""Lite: LightningLite's class, flags and methods on today's Fabric, with every strategy that nnx knows.

Old scripts change one line: ``from pytorch_lightning.lite import LightningLite`` becomes
``from nnx_core.lite import LightningLite``. `DeepSpeedPlugin` is here because strategies were called plugins.
"""

from __future__ import annotations

from nnx_core.lightning.lite.facade import Lite
from nnx_core.lightning.namespaces import fabric_module

DeepSpeedPlugin = fabric_module("strategies").DeepSpeedStrategy

__all__ = ["DeepSpeedPlugin", "LightningLite", "Lite"]

LightningLite = Lite
