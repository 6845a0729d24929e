"""The front door of the plugin: what it offers, as data."""

from __future__ import annotations

from nnx_core import LauncherSpec, hookimpl


@hookimpl
def nnx_launchers() -> list[LauncherSpec]:
    """Ray's actors as processes."""
    return [
        LauncherSpec(
            "ray",
            "nnx_ray.launcher:RayLauncher",
            description="actors of a Ray cluster",
            needs={"ray": "ray[train]"},
        )
    ]
