"""Automatic parallel training for PyTorch Lightning, as an nnx plugin.

nnScaler traces a model's forward, and a plan splits its operators over the ranks of a unit. It emits readable
Python for the plan, and runs that code on the user's own module. `nnx_nnscaler.backend` is the engine.
Importing this package imports neither torch nor Lightning; `NnScalerStrategy`, `NnScalerPrecision` and
`register_op` import both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx_nnscaler.compute_config import ComputeConfig
from nnx_nnscaler.options import NnScalerOptions

if TYPE_CHECKING:
    from nnx_nnscaler.rules.register_op import register_op
    from nnx_nnscaler.strategy import NnScalerPrecision, NnScalerStrategy

__all__ = ["ComputeConfig", "NnScalerOptions", "NnScalerPrecision", "NnScalerStrategy", "register_op"]


def __getattr__(name: str) -> Any:
    if name == "NnScalerStrategy":
        from nnx_nnscaler.strategy import NnScalerStrategy

        return NnScalerStrategy
    if name == "NnScalerPrecision":
        from nnx_nnscaler.strategy import NnScalerPrecision

        return NnScalerPrecision
    if name == "register_op":
        from nnx_nnscaler.rules.register_op import register_op

        return register_op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
