"""Train over slow links: fewer bytes in each step, or fewer exchanges."""

from nnx_comm.options import (
    BaguaOptions,
    DecentralizedOptions,
    DiLoCoOptions,
    LocalSGDOptions,
    PowerSGDOptions,
)

__all__ = ["BaguaOptions", "DecentralizedOptions", "DiLoCoOptions", "LocalSGDOptions", "PowerSGDOptions"]
