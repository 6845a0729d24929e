"""Warns of calls of torch.distributed in user code while several ranks compute each batch together.

On the default group such a call silently counts every sample once for each of these ranks. nnx replaces the
functions in `torch.distributed` during a run whose ranks share data. Code of nnx imports the functions by
name, so it calls torch's own.
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
"""Functions whose results depend on the number of ranks with a sample; ``..._single`` needs torch 2.13."""

_HARMLESS = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG)
"""Reductions whose result does not depend on the number of ranks with a sample."""

_torchs_own: dict[str, Callable[..., Any]] = {}


def warn_of_direct_calls(strategy: str, *, ranks: int) -> None:
    """Start warning, on rank zero and once per function; this replaces the warnings of an earlier run.

    Args:
        strategy: The name of the strategy, for the message.
        ranks: The number of ranks that compute each batch together, at least two.
    """
    stop_warning()
    for name in FUNCTIONS:
        own = getattr(dist, name, None)
        if own is not None:
            _torchs_own[name] = own
            setattr(dist, name, _warning(own, strategy, ranks))


def stop_warning() -> None:
    """Restore torch's own functions."""
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
    """Return True if a call is on the default group and its result depends on the number of ranks."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False  # torch raises a better error
    return bound.get("group") in (None, dist.group.WORLD) and bound.get("op") not in _HARMLESS
