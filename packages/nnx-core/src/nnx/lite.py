"""LightningLite on today's Fabric, under the name that scripts import it from."""

from nnx_core import LightningLite, Lite  # before nnx_lite, as this says what to install
from nnx_lite import DeepSpeedPlugin

__all__ = ["DeepSpeedPlugin", "LightningLite", "Lite"]
