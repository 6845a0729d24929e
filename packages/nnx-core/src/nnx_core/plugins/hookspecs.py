"""The hooks that a plugin may implement. Each is optional, takes nothing and returns data."""

from __future__ import annotations

import pluggy

from nnx_core.spec import CheckpointFormatSpec, LauncherSpec, StrategySpec

PROJECT = "nnx"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Mark a function of the plugin's module as the implementation of the hook of the same name."""


@hookspec
def nnx_strategies() -> list[StrategySpec]:  # type: ignore[empty-body]
    """The strategies that this plugin provides. Called once; must not import torch."""


@hookspec
def nnx_checkpoint_formats() -> list[CheckpointFormatSpec]:  # type: ignore[empty-body]
    """The foreign checkpoint formats that this plugin can read or write. Called when one is needed."""


@hookspec
def nnx_launchers() -> list[LauncherSpec]:  # type: ignore[empty-body]
    """The ways of starting processes that this plugin provides. Called when one is asked for."""
