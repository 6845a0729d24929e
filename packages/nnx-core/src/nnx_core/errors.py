"""Every error that nnx raises on purpose, in one tree; those of `nnx_checkpoint.errors` are part of it."""

from __future__ import annotations

from nnx_checkpoint.errors import (
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
    "NnxError",
    "OptionError",
    "PlanError",
    "PluginError",
    "RankLostError",
    "StrategyNotFoundError",
    "StrategyNotInstalledError",
    "UnsupportedError",
]


class StrategyNotFoundError(NnxError, ValueError):
    """No strategy of that name is known; the message suggests the nearest names."""


class StrategyNotInstalledError(NnxError, ImportError):
    """The name is in the catalog but the distribution that provides it is not installed."""


class OptionError(NnxError, ValueError):
    """An option of a strategy is unknown, of the wrong type, or contradicts another."""


class PlanError(NnxError):
    """No plan fits what was asked for, or a stored plan does not fit the model or the world."""
