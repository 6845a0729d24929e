"""Warns of calls of torch.distributed in user code while several ranks compute each batch together.

On the default group such a call counts every sample once for each of these ranks, silently. nnx replaces the
functions in `torch.distributed` for the time of a run whose ranks share data. Code of nnx imports them by
name, so that it calls torch's own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

__all__ = ["FUNCTIONS", "stop_warning", "warn_of_direct_calls"]

FUNCTIONS = (
    *("all_reduce", "all_reduce_coalesced", "reduce"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
    *("all_gather_object", "gather", "gather_object"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
)
"""Their results depend on how many ranks have a sample. torch before 2.13 has no ``..._single``."""

_HARMLESS = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG)
"""Reductions that give the same however often a sample counts."""

_torchs_own: dict[str, Callable[..., Any]] = {}


def warn_of_direct_calls(strategy: str, *, ranks: int) -> None:
    """Warn from now on, on rank zero and once for each function, in place of what an earlier run began.

    Args:
        strategy: Its name, for the message.
        ranks: How many ranks compute each batch together, at least two.
    """
    stop_warning()
    for name in FUNCTIONS:
        own = getattr(dist, name, None)
        if own is not None:
            _torchs_own[name] = own
            setattr(dist, name, _warning(own, strategy, ranks))


def stop_warning() -> None:
    """Put torch's own functions back."""
    for name, own in _torchs_own.items():
        setattr(dist, name, own)
    _torchs_own.clear()


def _warning(own: Callable[..., Any], strategy: str, ranks: int) -> Callable[..., Any]:
    signature = inspect.signature(own)
    has_warned = dist.get_rank() != 0

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        if not has_warned and _counts_ranks(signature, args, kwargs):
            has_warned = True
            warnings.warn(
                f"torch.distributed.{own.__name__} on the default group: under {strategy!r}, {ranks} ranks "
                f"compute each batch together, so the result counts every sample {ranks} times. Call "
                "`self.all_gather(...)` or `self.trainer.strategy.reduce(...)` instead "
                "(`fabric.all_gather`, `fabric.all_reduce`), which count it once, or pass `group=` with one "
                "rank of each unit.",
                UserWarning,
                stacklevel=2,
            )
        return own(*args, **kwargs)

    return call


def _counts_ranks(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call is one on the default group whose result depends on the number of ranks."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False  # torch itself says what is wrong
    return bound.get("group") in (None, dist.group.WORLD) and bound.get("op") not in _HARMLESS
