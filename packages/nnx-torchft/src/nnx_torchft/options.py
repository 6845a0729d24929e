"""The options of the elastic strategies. This module imports neither torch nor torchft."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option
from nnx_fsdp.options import FSDPOptions

__all__ = ["GROUP", "LIGHTHOUSE", "RUN", "ElasticOptions", "ShardedElasticOptions"]

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable with the address of the lighthouse, torchft's own name."""
RUN = "NNX_ELASTIC_RUN"
"""The variable with the name of the run, which `nnx run --elastic` sets."""
GROUP = "NNX_ELASTIC_GROUP"
"""The variable with the name of the group, which `nnx run --elastic` sets."""


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """Options of elastic training."""

    lighthouse: str = option(
        "",
        help="The lighthouse that the groups meet at, as 'host:port'; by default the variable "
        "TORCHFT_LIGHTHOUSE, which `nnx run --elastic` sets.",
        types=(str,),
    )
    run_id: str = option(
        "",
        help="The name of the run: groups of another run are refused, and a run that has ended does not "
        "begin again under its name. By default the variable NNX_ELASTIC_RUN, which `nnx run --elastic` "
        "sets. A run without a name is never marked as ended.",
        types=(str,),
    )
    group: str = option(
        "",
        help="The name of this group in messages; by default the variable NNX_ELASTIC_GROUP, or the host and "
        "process.",
        types=(str,),
    )
    min_groups: int = option(1, help="Training waits while there are fewer groups.", types=(int,))
    data: Literal["exact", "drop"] = option(
        "exact",
        help="'exact' trains each sample of an epoch once, in global batches of one size; 'drop' leaves the "
        "loader alone, so that each group reads data of its own, and a lost group's samples are lost.",
        choices=("exact", "drop"),
    )
    group_timeout: float = option(
        30.0,
        help="Seconds after which a group that lives and does not answer in a step is left behind; a group "
        "must heal within them.",
        types=(int, float),
    )
    quorum_timeout: float = option(
        120.0,
        help="Seconds to wait for the other groups between steps, and for a lighthouse that is gone.",
        types=(int, float),
    )
    connect_timeout: float = option(
        10.0, help="Seconds to wait for the lighthouse at the beginning.", types=(int, float)
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("group_timeout", "quorum_timeout", "connect_timeout"):
            if getattr(self, name) <= 0:
                raise OptionError(
                    f"{name}={getattr(self, name)!r} is not a positive number of seconds.",
                    remedy="Pass, say, 30.",
                )
        if self.min_groups < 1:
            raise OptionError(
                f"min_groups={self.min_groups!r} is no number of groups.", remedy="Pass, say, 1."
            )

    @property
    def address(self) -> str:
        """The host and port of the lighthouse.

        Raises:
            OptionError: No lighthouse is given, or the address has no port.
        """
        given = (self.lighthouse or os.environ.get(LIGHTHOUSE, "")).removeprefix("http://").rstrip("/")
        if not given:
            raise OptionError(
                "elastic training needs a lighthouse, and none is given.",
                remedy="Start the script with `nnx run --elastic 2 -- train.py`, which starts one; or pass "
                "lighthouse='host:port'.",
            )
        host, _, port = given.rpartition(":")
        if not host or not port.isdigit():
            raise OptionError(f"lighthouse={given!r} is no address.", remedy="Pass 'host:port'.")
        return given

    @property
    def run_name(self) -> str:
        """The name of the run; empty without one."""
        return self.run_id or os.environ.get(RUN, "")

    @property
    def group_name(self) -> str:
        """The name of this group."""
        return self.group or os.environ.get(GROUP, "") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class ShardedElasticOptions(ElasticOptions, FSDPOptions):
    """Options of elastic training, and those of FSDP2 for the processes of a group."""

    def __post_init__(self) -> None:
        ElasticOptions.__post_init__(self)
        FSDPOptions.__post_init__(self)
