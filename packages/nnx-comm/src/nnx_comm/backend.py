"""`SlowLink`, the common part of all strategies for slow links; `SlowLinkBackend`, plain data parallelism."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.reading.state import OptimizerState, parameter_names
from nnx_comm.algorithm import Algorithm
from nnx_comm.state import add_state, load_state
from nnx_core.agree.equal_options import refuse_unequal_options
from nnx_core.backend import Backend, OptionsT, ParallelContext, Sample
from nnx_core.optimizers.gradients import refuse_sparse_layers
from nnx_core.view.modules import broadcast_module, move_to

__all__ = ["SlowLink", "SlowLinkBackend", "log"]

log = logging.getLogger("nnx.comm")


class SlowLink(Backend[OptionsT]):
    """Exchanges tensors with other ranks by an `Algorithm`, counts bytes, and stores the algorithm's state.

    Attributes:
        ALONE: Logged if there is nothing to exchange.
        algorithm: The algorithm of this run.
        payload: The bytes that this rank sent for the last step.
        total: The bytes that this rank sent in the run.
        is_loading: True while the optimizer is restored without the algorithm.
    """

    ALONE: ClassVar[str] = "There is one rank: it trains as one process, and exchanges nothing"

    algorithm: Algorithm

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self.payload = self.total = 0
        self.is_loading = False

    @abstractmethod
    def make_algorithm(self) -> Algorithm:
        """Return the algorithm of the options, without state."""

    @property
    def link_rank_and_size(self) -> tuple[int, int]:
        """This rank among those that it exchanges with, and their number."""
        return self.context.rank, self.context.world_size

    @property
    def is_alone(self) -> bool:
        """True if there is nothing to exchange."""
        return self.link_rank_and_size[1] == 1

    @property
    def compared_options(self) -> object:
        """The options that must be equal on all ranks."""
        return self.options

    def setup(self, context: ParallelContext) -> None:
        """Make the algorithm; compare the options over the ranks. Collective.

        Raises:
            DisagreementError: A rank has other options.
        """
        super().setup(context)
        self.payload = self.total = 0
        self.algorithm = self.make_algorithm()
        if self.is_alone:
            log.warning(self.ALONE)
        else:
            refuse_unequal_options(self.compared_options)

    def count(self, payload: int) -> None:
        """Count the bytes of a step."""
        self.payload = payload
        self.total += payload

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this rank sent for the last step and in the run."""
        return {"payload_bytes": float(self.payload), "payload_bytes_total": float(self.total)}

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the optimizer's state and on the algorithm's."""
        state = super().optimizer_state(module, optimizer)
        if not self.is_loading:
            own, names = self.own_state(optimizer), parameter_names(module)
            add_state(state, self.algorithm, own, names, self.link_rank_and_size)
        return state

    def own_state(self, optimizer: Optimizer) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Return the tensors of this rank alone that a checkpoint stores, by parameter and name."""
        return self.algorithm.own

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the optimizer and the algorithm."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            self.algorithm.own.pop(parameter, None)
            self.algorithm.shared.pop(parameter, None)
        self.algorithm.common.clear()
        self.is_loading = True
        try:
            super().load_optimizer_state(module, optimizer, saved)
        finally:
            self.is_loading = False
        load_state(saved, self.algorithm, parameter_names(module), self.link_rank_and_size)


class SlowLinkBackend(SlowLink[OptionsT]):
    """Every rank holds the model, and exchanges gradients or weights with all others."""

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Move the module to the device, with rank zero's values. Collective."""
        move_to(module, self.context.device)
        broadcast_module(module)
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Do nothing: the parameters are the user's own."""
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse sparse gradients."""
        if optimizers:
            refuse_sparse_layers(module, engine="this strategy")
