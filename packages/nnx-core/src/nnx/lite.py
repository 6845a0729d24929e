"""LightningLite on today's Fabric, under the name that scripts import it from."""

from nnx_core.lite import DeepSpeedPlugin, LightningLite, Lite

__all__ = ["DeepSpeedPlugin", "LightningLite", "Lite"]
