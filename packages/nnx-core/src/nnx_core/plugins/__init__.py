"""Plugins: what they may implement, how they are found, and what went wrong with each.

    from nnx_core import StrategySpec, hookimpl

    @hookimpl
    def nnx_strategies():
        return [StrategySpec("mine", "my_package.backend:MyBackend")]

A distribution declares such a module as an entry point of the group ``nnx``. Read `hookspecs` for the
hooks, `discovery` for how plugins are visited, `guard` for one plugin's turn, `records` for what is
kept of it.
"""

from nnx_core.plugins.discovery import Inventory, checkpoint_formats, inventory, launchers, refresh
from nnx_core.plugins.guard import Plugin, Problem
from nnx_core.plugins.hookspecs import hookimpl

__all__ = [
    "Inventory",
    "Plugin",
    "Problem",
    "checkpoint_formats",
    "hookimpl",
    "inventory",
    "launchers",
    "refresh",
]
