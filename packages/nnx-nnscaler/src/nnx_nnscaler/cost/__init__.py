"""What a plan costs: computation, communication and memory of one rank."""

from nnx_core.hardware import Hardware, Link, MeasuredLink
from nnx_nnscaler.cost.model import CostModel

__all__ = ["CostModel", "Hardware", "Link", "MeasuredLink"]
