"""Options of the launcher. This module needs the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nnx_core.errors import OptionError
from nnx_core.launch.launcher import LauncherOptions
from nnx_core.options import option

__all__ = ["RayOptions"]


@dataclass(frozen=True, kw_only=True)
class RayOptions(LauncherOptions):
    """Options of ``launcher="ray"``."""

    address: str | None = option(
        None,
        help="Head of the cluster: 'host:port', 'ray://host:port', or 'auto' for one on this machine. "
        "Default: RAY_ADDRESS, or else a new cluster on this machine.",
        types=(str,),
    )
    placement: Literal["spread", "pack", "strict_spread", "strict_pack"] = option(
        "spread",
        help="Placement of Trainer's nodes: 'spread' over Ray's nodes, 'pack' on few, or strictly so. "
        "The processes of one Trainer node always share a Ray node.",
        choices=("spread", "pack", "strict_spread", "strict_pack"),
    )
    cpus_per_worker: float = option(1, help="CPUs that each process reserves.", types=(int, float))
    resources_per_worker: Mapping[str, float] = option(
        {}, help="Further resources that each process reserves, by Ray's names.", types=(Mapping,)
    )
    runtime_env: Mapping[str, Any] = option(
        {},
        help="Ray's runtime environment of the processes: `env_vars`, `pip`, `working_dir` and so on.",
        types=(Mapping,),
    )
    max_failures: int = option(
        3,
        help="Number of restarts after the loss of a process or node, each from the last committed "
        "checkpoint. An exception in your own code always ends the run.",
        types=(int,),
    )
    start_timeout: float = option(
        60.0,
        help="Seconds to wait for the cluster's answer, and for the requested resources.",
        types=(int, float),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus_per_worker", "max_failures"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)!r} is negative.", remedy="Pass 0 or more.")
        if self.start_timeout <= 0:
            raise OptionError(
                f"start_timeout={self.start_timeout!r} is not a positive number of seconds.",
                remedy="Pass, say, 60.",
            )
