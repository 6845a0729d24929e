"""`ColossalAIPrecision`: mixed precision for the Trainer under the name that lightning-colossalai gave it.

``Trainer(precision="16-mixed")`` does the same on a GPU and is all that most need. On the CPU Lightning makes
that 'bf16-mixed' before a strategy sees it; this plugin stays what it is. The loss scale is the strategy's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch

from nnx_core.lightning.namespaces import trainer_tree
from nnx_core.options import check_choice

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class ColossalAIPrecision:
    """A precision plugin for the Trainer of the copy of Lightning that is in use, on CPU and GPU.

    Args:
        precision: ``"16-mixed"`` (16 is the same), or ``"bf16-mixed"``, which scales no loss.

    Example:
        >>> ColossalAIPrecision().precision
        '16-mixed'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ColossalAIPrecision:
        """An object of this class and of Lightning's own for mixed precision."""
        made = _class_for(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("ColossalAIPrecision", object.__new__(made))

    def __init__(self, precision: str | int = "16-mixed") -> None:
        chosen = "16-mixed" if str(precision) == "16" else str(precision)
        check_choice("precision", chosen, tuple(_DTYPES))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(chosen, device)  # type: ignore[call-arg] # of Lightning's MixedPrecision

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in 16 bits wherever the tensors are: with a GPU at hand, some train without it."""
        with ExitStack() as stack:
            for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
                dtype = _DTYPES[self.precision]  # type: ignore[attr-defined] # of Lightning's
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield


@cache
def _class_for(cls: type, root: str) -> type:
    mixed = importlib.import_module(f"{root}.plugins.precision").MixedPrecision
    return type(cls.__name__, (cls, mixed), {"__module__": cls.__module__, "__doc__": cls.__doc__})
