"""Faults that show only on several nodes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from faults import fault
from nnx_tiny.backend import TinyBackend


class AveragesOnItsNode(TinyBackend):
    """Averages gradients within a node only."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.context.local_world_size > 1:
            super().backward(module, loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)


class OnTheFirstNode(DDPStrategy):
    """Treats every node as the first one."""

    @property
    def node_rank(self) -> int:
        return 0 if dist.is_initialized() else super().node_rank


class ForgetsOnOtherNodes(TinyBackend):
    """Restores the optimizer on the first node only."""

    def load_optimizer_state(self, *args: Any) -> None:
        if self.context.rank < self.context.local_world_size:
            super().load_optimizer_state(*args)


class ZeroOnEachNode(DDPStrategy):
    """Treats the first rank of each node as rank 0."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        rank_zero_only.rank = int(os.environ["LOCAL_RANK"])


FAULTS = [
    fault(
        "gradients averaged on each node",
        AveragesOnItsNode,
        "losses_across_nodes",
        *("node_and_local_ranks", "resume_at_node_counts", "rank_zero_across_nodes"),
    ),
    fault("every node is the first", OnTheFirstNode, "node_and_local_ranks"),
    fault("optimizer state restored on one node", ForgetsOnOtherNodes, "resume_at_node_counts"),
    fault("a rank 0 on each node", ZeroOnEachNode, "rank_zero_across_nodes"),
]
