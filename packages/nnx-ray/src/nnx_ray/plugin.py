"""Describe the launcher of this plugin, as data."""

from __future__ import annotations

from nnx_core import LauncherSpec, hookimpl


@hookimpl
def nnx_launchers() -> list[LauncherSpec]:
    """Return the launcher that starts processes as Ray's actors."""
    return [
        LauncherSpec(
            "ray",
            "nnx_ray.launcher:RayLauncher",
            description="actors of a Ray cluster",
            needs={"ray": "ray[train]"},
        )
    ]
