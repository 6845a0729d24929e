"""The private names of torch that the ground floor relies on, and the record of a private name.

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
        first: The first version of torch that it was seen in.
        last: The last one.
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
"""Context in which guarded tensors are what the engine made of them, on this thread."""


def default_group() -> dist.ProcessGroup:
    """The group of all ranks, which must have been made."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Store:
    """The store that the ranks of the default group met at."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """All process groups of this process; torch lists them nowhere else."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group waits for a rank."""
    return group._get_backend(group._device_types[0]).options._timeout
