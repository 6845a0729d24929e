"""The engines of a group: the whole model in one process, or FSDP2 over the processes of the group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.reading.state import OptimizerState
from nnx_core.backend import Backend, OptionsT, ParallelContext, Sample
from nnx_core.errors import UnsupportedError
from nnx_fsdp.backend import FSDPBackend
from nnx_fsdp.options import FSDPOptions
from nnx_torchft.options import ElasticOptions, ShardedElasticOptions

__all__ = ["ElasticBackend", "ShardedBackend", "WholeBackend"]


class ElasticBackend(Backend[OptionsT]):
    """Mixin of an engine within a group; a backward counts by the share of the batch.

    Attributes:
        weight: The factor of the loss in the next backward.
    """

    weight: float = 1.0

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of the weighted loss."""
        super().backward(module, loss * self.weight, *args, **kwargs)

    def local(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters and gradients are those that this rank holds."""
        return nullcontext()

    def own_optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the state that this rank holds, without communication."""
        return self.optimizer_state(module, optimizer)


class WholeBackend(ElasticBackend[ElasticOptions]):
    """One process with the whole model."""

    Options = ElasticOptions

    def setup(self, context: ParallelContext) -> None:
        """Keep the context.

        Raises:
            UnsupportedError: There are several processes.
        """
        if context.world_size > 1:
            raise UnsupportedError(
                f"a group of torchft_ddp has one process, and this Trainer has {context.world_size}.",
                remedy="Pass Trainer(devices=1, num_nodes=1), and start as many groups as you have devices: "
                "`nnx run --elastic 4 -- train.py`. For several processes in a group use 'torchft_hsdp'.",
            )
        super().setup(context)

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Move the module to the device."""
        module.to(self.context.device)
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Do nothing: the module was never changed."""
        return {}


class ShardedBackend(FSDPBackend, ElasticBackend[FSDPOptions]):
    """The engine of fsdp_auto over the processes of the group."""

    Options = ShardedElasticOptions
