"""The private name of torch that this package uses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from nnx_base._torch_compat import Private

PRIVATE_NAMES = {
    "DataLoader._iterator": Private("a loader with persistent workers may yield batches of an earlier run"),
}
"""The private names of torch that this module uses, and what happens where torch lacks one."""


def with_batches(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other batches, other workers, which persist, and a generator of its own.

    A loader forbids such a change after construction, and its constructor is unknown if it is a subclass.
    """
    made = copy.copy(loader)
    for name, value in {
        "batch_sampler": batch_sampler,
        "persistent_workers": loader.num_workers > 0,
        "generator": torch.Generator(),
        "_iterator": None,
    }.items():
        object.__setattr__(made, name, value)
    return made
