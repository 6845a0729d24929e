"""Warns of calls of torch.distributed in user code while several ranks compute each batch together.

On the default group such a call counts every sample once for each of these ranks, silently. nnx replaces the
functions in `torch.distributed` for the time of a run whose ranks share data; each call site is named once.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch.distributed as dist

__all__ = ["stop_warning", "warn_of_direct_calls"]

_FUNCTIONS = (
    *("all_reduce", "all_reduce_coalesced", "reduce"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
    *("all_gather_object", "gather", "gather_object"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
)
"""Their results depend on how many ranks have a sample. torch before 2.13 has no ``..._single``."""

_HARMLESS = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG)
"""Reductions that give the same however often a sample counts."""

_OURS = ("nnx_checkpoint", "nnx_core")
"""Packages that count each sample once already, beside that of the engine."""

_torchs_own: dict[str, Callable[..., Any]] = {}


def warn_of_direct_calls(strategy: str, *, engine: str, ranks: int) -> None:
    """Warn from now on, on rank zero, in place of what an earlier run began.

    Args:
        strategy: Its name, for the message.
        engine: The package of its backend, whose own calls are left alone.
        ranks: How many ranks compute each batch together, at least two.
    """
    stop_warning()
    seen: set[tuple[str, int]] = set()
    for name in _FUNCTIONS:
        own = getattr(dist, name, None)
        if own is not None:
            _torchs_own[name] = own
            setattr(dist, name, _warning(own, seen, partial(_warn, name, strategy, ranks), engine))


def stop_warning() -> None:
    """Put torch's own functions back."""
    for name, own in _torchs_own.items():
        setattr(dist, name, own)
    _torchs_own.clear()


def _warning(
    own: Callable[..., Any], seen: set[tuple[str, int]], warn: Callable[[], None], engine: str
) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") in (None, dist.group.WORLD):
            caller = sys._getframe(1)
            site = caller.f_code.co_filename, caller.f_lineno
            is_users = site not in seen and _is_users(caller.f_globals.get("__name__", ""), engine)
            if is_users and dist.get_rank() == 0 and _counts_ranks(signature, args, kwargs):
                seen.add(site)
                warn()
        return own(*args, **kwargs)

    return call


def _is_users(module: str, engine: str) -> bool:
    """Whether a module is of the user or of a library, and not of what saves or of the engine."""
    return module.partition(".")[0] not in (*_OURS, engine) and "torch.distributed.checkpoint" not in module


def _counts_ranks(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one on the default group whose result depends on the number of ranks."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False  # torch itself says what is wrong
    return bound.get("group") in (None, dist.group.WORLD) and bound.get("op") not in _HARMLESS


def _warn(function: str, strategy: str, ranks: int) -> None:
    file, line = _line_of_user()
    warnings.warn_explicit(
        f"torch.distributed.{function} on the default group: under {strategy!r}, {ranks} ranks compute each "
        f"batch together, so the result counts every sample {ranks} times. Call `self.all_gather(...)` or "
        "`self.trainer.strategy.reduce(...)` instead (`fabric.all_gather`, `fabric.all_reduce`), which count "
        "it once, or pass `group=` with one rank of each unit.",
        UserWarning,
        file,
        line,
    )


def _line_of_user() -> tuple[str, int]:
    """The innermost line outside of nnx and of what is installed; without one, the line of the call."""
    stack = [entry for entry in reversed(traceback.extract_stack()) if entry.filename != __file__]
    library = sysconfig.get_path("stdlib")
    installed = ("site-packages", "dist-packages", "<")  # the last for code that was made
    users = [
        entry
        for entry in stack
        if not entry.filename.startswith(library) and not any(name in entry.filename for name in installed)
    ]
    found = (users or stack)[0]
    return found.filename, found.lineno or 1
