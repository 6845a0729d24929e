"""The shards that a rank saves by itself, without Lightning, in a world as that of a loop under torchrun."""

import torch

from nnx_base.shard import shard_of

shards = {"weight": shard_of(torch.ones(4, 3)), "bias": shard_of(torch.zeros(3))}

torch.distributed.init_process_group("gloo")
