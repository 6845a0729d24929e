"""All errors of nnx, in one class tree with those of `nnx_base.errors`."""

from __future__ import annotations

from nnx_base.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DisagreementError,
    NnxError,
    PluginError,
    RankLostError,
    UnsupportedError,
)

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "DisagreementError",
    "LaunchError",
    "NnxError",
    "OptionError",
    "PackageNotInstalledError",
    "PlanError",
    "PluginError",
    "RankLostError",
    "StrategyNotFoundError",
    "StrategyNotInstalledError",
    "UnsupportedError",
    "follows_lost_rank",
    "is_lost_connection",
]


class StrategyNotFoundError(NnxError, ValueError):
    """No strategy of that name is known; the message suggests the nearest names."""


class StrategyNotInstalledError(NnxError, ImportError):
    """The name is in the catalog but the distribution that provides it is not installed."""


class PackageNotInstalledError(NnxError, ImportError):
    """A public name is in a distribution that is not installed."""


class OptionError(NnxError, ValueError):
    """An option of a strategy is unknown, of the wrong type, or contradicts another."""


class PlanError(NnxError):
    """No plan fits the request, or a stored plan does not fit the model or the world."""


class LaunchError(NnxError, RuntimeError):
    """The processes of a run could not be started, or were lost more often than allowed."""


_LOST_CONNECTIONS = (
    *("Connection reset by peer", "Connection closed by peer", "caused pair closure"),
    *("for send operation to complete", "for recv operation to complete"),
    *("Connection was likely closed", "Broken pipe"),
)
"""Texts in errors of gloo and the store about a rank that is gone or unreachable."""


def is_lost_connection(error: BaseException) -> bool:
    """Return True if gloo or the store raised this error because another rank is gone.

    Example:
        >>> is_lost_connection(RuntimeError("... Connection closed by peer [127.0.0.1]:21934"))
        True
    """
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_CONNECTIONS)


def follows_lost_rank(error: BaseException | None) -> bool:
    """Return True if an error, or one in its chain of causes, reports that another rank is gone.

    Example:
        >>> gloo = RuntimeError("... Connection closed by peer [127.0.0.1]:21934")
        >>> save = CheckpointError("saving 'a.ckpt' stopped.")
        >>> save.__cause__ = gloo
        >>> follows_lost_rank(save), follows_lost_rank(CheckpointError("saving 'a.ckpt' stopped."))
        (True, False)
    """
    while error is not None:
        if isinstance(error, RankLostError) or is_lost_connection(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
