"""The shards that a rank saves by itself, without Lightning."""

import torch

from nnx_checkpoint.shard import shard_of

shards = {"weight": shard_of(torch.ones(4, 3)), "bias": shard_of(torch.zeros(3))}
