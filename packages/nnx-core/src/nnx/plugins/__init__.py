"""Plugins: what they may implement, how they are found, and what went wrong with each.

    from nnx import StrategySpec, hookimpl

    @hookimpl
    def nnx_strategies():
        return [StrategySpec("mine", "my_package.backend:MyBackend")]

A distribution declares such a module as an entry point of the group ``nnx``. Read `hookspecs` for the
hooks, `discovery` for how they are called, `problem` for what is recorded when one fails.
"""

from nnx.plugins.discovery import Inventory, Plugin, checkpoint_formats, inventory, refresh
from nnx.plugins.hookspecs import hookimpl
from nnx.plugins.problem import Problem

__all__ = ["Inventory", "Plugin", "Problem", "checkpoint_formats", "hookimpl", "inventory", "refresh"]
