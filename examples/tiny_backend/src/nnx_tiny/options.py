"""Options of the strategy `tiny`: apart from the engine, so that `nnx show` need not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_core.errors import OptionError
from nnx_core.options import option

__all__ = ["TinyOptions"]


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """Keyword arguments of ``nnx.strategy("tiny", ...)``."""

    bucket_megabytes: float = option(25.0, help="Gradients are averaged in pieces of about this size.")

    def __post_init__(self) -> None:
        if self.bucket_megabytes <= 0:
            raise OptionError(
                f"bucket_megabytes={self.bucket_megabytes!r} is not a positive size.", remedy="Pass, say, 25."
            )
