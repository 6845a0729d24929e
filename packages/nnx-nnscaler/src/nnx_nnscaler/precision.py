"""`NnScalerPrecision`: Lightning's precision plugins under the name that nnScaler gave its own.

``Trainer(precision="...")`` does the same and is all that most need. What the class adds is a gradient
scaler of your own with '16-true', and '16-mixed' on CPU too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch

from nnx_core.errors import OptionError
from nnx_core.lightning.namespaces import trainer_tree
from nnx_core.options import check_choice

__all__ = ["PRECISIONS", "NnScalerPrecision"]

PRECISIONS = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_TRUE_HALVES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class NnScalerPrecision:
    """A precision plugin for the Trainer of the copy of Lightning that is in use.

    Args:
        precision: One of 32-true, 16-true, bf16-true, 16-mixed, bf16-mixed.
        scaler: Scales the loss, so that small gradients survive in float16. '16-mixed' makes one unless you
            bring yours; the other modes have none unless you do. Overflow on one rank skips the step on all.

    Example:
        >>> NnScalerPrecision("16-mixed").scaler is not None
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NnScalerPrecision:
        """An object of this class and of Lightning's own class for the precision."""
        precision = str(kwargs.get("precision", args[0] if args else "32-true"))
        made = _class_for(cls, precision, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("NnScalerPrecision", object.__new__(made))

    def __init__(self, precision: str = "32-true", scaler: torch.amp.GradScaler | None = None) -> None:
        check_choice("precision", precision, PRECISIONS)
        if scaler is not None and precision.startswith("bf16"):
            raise OptionError(
                f"precision={precision!r} with a scaler: bfloat16 has the range of float32.",
                remedy="Leave the scaler out.",
            )
        if scaler is None and precision == "16-mixed":
            scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = precision
        self.scaler = scaler
        self._desired_input_dtype = _TRUE_HALVES.get(precision, torch.float32)  # what Lightning's own reads

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute as the precision says, on whatever device the tensors are."""
        with ExitStack() as stack:
            if self.precision in _MIXED:
                for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
                    context = torch.autocast(device, dtype=_MIXED[self.precision], cache_enabled=False)
                    stack.enter_context(context)
            elif self.precision in _TRUE_HALVES:
                stack.enter_context(super().forward_context())  # type: ignore[misc] # of HalfPrecision
            yield


@cache
def _class_for(cls: type, precision: str, root: str) -> type:
    """The class of Lightning's that steps with a scaler, and for true halves the one that casts."""
    plugins = importlib.import_module(f"{root}.plugins.precision")
    casting = (plugins.HalfPrecision,) if precision in _TRUE_HALVES else ()
    bases = (cls, *casting, plugins.MixedPrecision)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
