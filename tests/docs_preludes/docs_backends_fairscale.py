"""`shards`: each rank's FSDP checkpoint of fairscale itself, for two ranks, made without communication."""

import os
from pathlib import Path

import torch


class Group:
    """A process group of two ranks that returns this rank."""

    def __init__(self, number):
        self.number = number

    def rank(self):
        return self.number

    def size(self):
        return 2


if os.environ["RANK"] == "0":
    from fairscale.nn import FullyShardedDataParallel

    from nnx_fairscale._fairscale_fsdp import HostShim

    HostShim.install()
    Path("shards").mkdir()
    for rank in range(2):
        held = FullyShardedDataParallel(
            Net(),  # noqa: F821
            process_group=Group(rank),
            process_group_reduce_scatter=Group(rank),
            compute_device=torch.device("cpu"),
        )
        saved = {"weights": held.local_state_dict(), "meta": held.local_metadata_dict()}
        torch.save(saved, f"shards/rank{rank}.pt")
    HostShim.remove()
