"""`fsdp_hybrid_compressed`: FSDP2 within a node, and gradients averaged over the nodes through a codec."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_comm.algorithm import Averaging, all_finite
from nnx_comm.gradients import GradientExchange
from nnx_comm.options import CodecOptions, HybridOptions
from nnx_comm.wire import Lossy, make_wire
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.backend import ParallelContext
from nnx_core.optimizers.gradients import Gradient
from nnx_fsdp.backend import FSDPBackend

__all__ = ["HybridBackend"]


class HybridBackend(GradientExchange[HybridOptions], FSDPBackend):
    """Shards over the ranks of a node; ranks with the same shard on all nodes exchange its gradient.

    FSDP2 knows one node only: it averages gradients within the node. The exchange over the nodes follows the
    backward, and then shards of all nodes are equal.
    """

    Options = HybridOptions
    ALONE: ClassVar[str] = "There is one node: nothing is exchanged between nodes"

    _between: dist.ProcessGroup

    def make_mesh(self, context: ParallelContext) -> DeviceMesh:
        """Return the mesh of this node; its ranks along the other mesh dim exchange gradients."""
        mesh = super().make_mesh(context)
        self._between = mesh["replicate"].get_group()
        return mesh["shard"]

    def make_algorithm(self) -> Averaging:
        """Return the average over the nodes through the codec of the options."""
        options = self.options
        wire = make_wire(options.codec, options.density, group=self._between)
        return Averaging(wire, error_feedback=options.error_feedback)

    @property
    def link_rank_and_size(self) -> tuple[int, int]:
        """The number of this node, and the number of nodes."""
        return dist.get_rank(self._between), dist.get_world_size(self._between)

    @property
    def compared_options(self) -> CodecOptions:
        """The options of the codec: a policy of FSDP2 may be a function, which ranks cannot compare."""
        options = self.options
        return CodecOptions(
            codec=options.codec, error_feedback=options.error_feedback, density=options.density
        )

    def average(self, module: nn.Module) -> None:
        """Average the shards' gradients over the nodes, or call `skip_step`. Collective."""
        with self.local():
            shards: dict[nn.Parameter, Tensor] = {
                parameter: parameter.grad.to_local()
                for parameter in module.parameters()
                if isinstance(parameter.grad, DTensor)
            }
            is_lossy = isinstance(self.algorithm.wire, Lossy)
            if is_lossy and used_anywhere([not all_finite(shards)])[0]:
                self.skip_step(module)
            else:
                self.exchange(shards)

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on the local gradients; every node has each of them."""
        nodes = self.link_rank_and_size[1]
        return [replace(each, replicas=max(each.replicas, nodes)) for each in super().gradients(optimizer)]
