"""LightningLite on today's Fabric, under the name that scripts import it from."""

from nnx_core import LightningLite, Lite  # says how to install nnx-lite where it is missing
from nnx_lite import DeepSpeedPlugin

__all__ = ["DeepSpeedPlugin", "LightningLite", "Lite"]
