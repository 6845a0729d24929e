"""List the private names of torch that `nnx_base` uses, and define the record of a private name.

Nothing else in `nnx_base` uses a private name. `PRIVATE_NAMES` lists them; tests/test_private_names.py
looks each of them up, and finds the names that are used elsewhere or are in no list.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Private(NamedTuple):
    """A private name of torch that nnx uses.

    Attributes:
        without: The consequence if torch lacks it.
        first: The first version of torch that it was checked with.
        last: The last version of torch that it was checked with.
    """

    without: str
    first: str = "2.11"
    last: str = "2.14"


IMPORT = "importing the package raises ImportError or AttributeError with the name"
PRIVATE_NAMES = {
    "torch._C.DisableTorchFunctionSubclass": Private(IMPORT),
    "torch.distributed.distributed_c10d._get_default_group": Private("any run on several ranks raises"),
    "torch.distributed.distributed_c10d._get_default_store": Private("any run on several ranks raises"),
    "torch.distributed.distributed_c10d._world": Private("nnx conformance raises AttributeError"),
    "ProcessGroup._device_types": Private("any run on several ranks raises AttributeError"),
    "ProcessGroup._get_backend": Private("any run on several ranks raises AttributeError"),
    "Backend.Options._timeout": Private("any run on several ranks raises AttributeError"),
}
"""The private names of torch that this module uses, and what happens where torch lacks one."""

local_mode = torch._C.DisableTorchFunctionSubclass
"""Context manager that shows guarded tensors as the engine's own tensors, on this thread."""


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks (after ``init_process_group``)."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Store:
    """Return the store of the default group's rendezvous."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """Return all process groups of this process; torch lists them nowhere else."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives."""
    return group._get_backend(group._device_types[0]).options._timeout
