"""`HivemindBackend`: each process is a peer, and trains the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from nnx_base.shard import shard_of
from nnx_checkpoint.reading.naming import StoredName
from nnx_checkpoint.reading.state import ModelState, OptimizerState
from nnx_core.backend import Backend, ParallelContext, Sample
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.lightning.beginning import size_of_batch
from nnx_core.machine.notes import leave_note
from nnx_core.optimizers.gradients import refuse_sparse_layers
from nnx_core.view.modules import move_to
from nnx_hivemind._hivemind_compat import at_exit
from nnx_hivemind.options import PEERS, HivemindOptions
from nnx_hivemind.peer import Peer

__all__ = ["HivemindBackend"]

T = TypeVar("T")
_STATE = "hivemind:"
"""The entry in the state of an optimizer that other strategies ignore."""
_PRECISIONS = ("32-true", "bf16-mixed")


class HivemindBackend(Backend[HivemindOptions]):
    """Trains the model in one process, as a peer of a swarm.

    Attributes:
        peer: This process in the swarm; None outside of `setup` and `teardown`.
    """

    Options = HivemindOptions
    peer: Peer | None = None
    _optimizer: Optimizer | None = None

    def setup(self, context: ParallelContext) -> None:
        """Start a node of the swarm's DHT.

        Raises:
            UnsupportedError: There are several processes, or the precision is not supported.
            OptionError: There is no target_batch_size, or an address cannot be read.
            RankLostError: No peer answers.
        """
        if not self.options.target_batch_size:
            raise OptionError(
                "hivemind needs target_batch_size, the samples of all peers after which all peers step.",
                remedy="Pass the global batch with which one process trains well: "
                "nnx.strategy('hivemind', target_batch_size=256).",
            )
        if context.world_size > 1:
            raise UnsupportedError(
                f"a peer of hivemind has one device, and this run has {context.world_size}.",
                remedy="Pass devices=1, num_nodes=1, and start a peer for each device; or shard over the "
                "devices of a site with 'torchft_hsdp'.",
            )
        if context.precision not in _PRECISIONS:
            raise UnsupportedError(
                f"hivemind averages in float32, and cannot train with precision={context.precision!r}.",
                remedy=f"Pass one of {', '.join(_PRECISIONS)}.",
            )
        super().setup(context)
        self._samples = 0
        self.peer = Peer(self.options)
        self.data_order = self.peer.order
        self._remove_note = leave_note(self._joining)
        at_exit(self.teardown)  # Fabric has no end of a run

    @property
    def _in_swarm(self) -> Peer:
        assert self.peer is not None
        return self.peer

    @property
    def _joining(self) -> str:
        peer = self._in_swarm
        return (
            f"peer {peer.order} of run {self.options.run_id!r}, which steps after "
            f"{self.options.target_batch_size} samples of all peers; another peer joins with "
            f"{PEERS}={peer.address}"
        )

    @property
    def epoch(self) -> int:
        """The steps of the swarm."""
        return self._in_swarm.epoch

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Move the module to the device."""
        move_to(module, self.context.device)
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Introduce this peer to the others.

        Raises:
            UnsupportedError: The swarm trains something else, or cannot train this.
        """
        if len(optimizers) > 1 or (optimizers and self._optimizer not in (None, optimizers[0])):
            raise UnsupportedError(
                "hivemind trains with one optimizer, and there are several.",
                remedy="Use one optimizer with several param groups, or strategy 'torchft_ddp' or 'bagua'.",
            )
        self._optimizer = optimizers[0] if optimizers else None
        if self._optimizer is None:
            return
        refuse_sparse_layers(module, engine="hivemind")
        self._refuse_schedulers(module)
        self._in_swarm.introduce(module, self._optimizer)

    def _refuse_schedulers(self, module: nn.Module) -> None:
        trainer = getattr(module, "_trainer", None)
        if trainer is not None and trainer.lr_scheduler_configs and module.automatic_optimization:
            raise UnsupportedError(
                "a scheduler of configure_optimizers counts the batches of this peer, and peers differ.",
                remedy="Return the optimizer alone, and pass a function that makes the scheduler as "
                "scheduler_fn: it counts the steps of the swarm.",
            )

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse another optimizer: other peers would not follow."""
        raise UnsupportedError(
            "the optimizer was replaced while training, and other peers keep theirs.",
            remedy="Save a checkpoint, and resume all peers with the new optimizer under another run_id.",
        )

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Wait for the last weights of steps in the background."""
        if self.peer is not None:
            self.peer.settle()
        return {}

    def teardown(self) -> None:
        """Leave the swarm."""
        peer, self.peer = self.peer, None
        self._optimizer = None
        if peer is not None:
            self._remove_note()
            peer.close()

    # A step

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Join the swarm before the first training step, and count the samples of each."""
        if torch.is_grad_enabled() and self._optimizer is not None:
            if self._in_swarm.hive is None:
                self._in_swarm.join(self._optimizer)
            self._samples += size_of_batch((args, kwargs)) or 0
        return step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Give the gradients to the swarm; hivemind calls this again for the swarm's step."""
        peer = self._in_swarm
        if peer.is_stepping:
            result: T = peer.run_inner(partial(step, *args, **kwargs))
            return result
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples, self._samples = self.options.batch_size or self._samples, 0
        if peer.hive is None or not samples:
            raise UnsupportedError(
                "the samples of a step cannot be counted: no training step of the model had a tensor.",
                remedy="Pass batch_size=..., and call the model that `fabric.setup` returned.",
            )
        peer.step(samples)
        return loss  # type: ignore[return-value] # as the step of any optimizer

    def clip_grad_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the swarm's gradients by their norm before its step; return the norm of this peer's."""
        self._in_swarm.clip = partial(
            clip_grad_norm_, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clip each element of the swarm's gradients before its step."""
        self._in_swarm.clip = partial(clip_grad_value_, clip_value=clip_value)

    def metrics(self) -> Mapping[str, float]:
        """Return the step of the swarm, its peers, and those of the last average."""
        peer = self._in_swarm
        return {
            "hivemind/epoch": float(peer.epoch),
            "hivemind/peers": float(peer.peers),
            "hivemind/averaged_with": float(peer.averaged_with),
        }

    def summary(self, module: nn.Module) -> str:
        """Return the place of this peer, and the line with which another one joins."""
        return self._joining

    # State

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on the weights, after steps in the background."""
        if self.peer is not None:
            self.peer.settle()
        return super().model_state(module)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the optimizer's state, with the step of the swarm."""
        if self.peer is not None:
            self.peer.settle()
        state = super().optimizer_state(module, optimizer)
        if self.peer is not None and self.peer.epoch:
            state["state"][_STATE] = {"epoch": shard_of(torch.tensor(self.peer.epoch))}
        return state

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the optimizer, and join the swarm again with it."""
        peer = self._in_swarm
        peer.leave()
        peer.epoch = 0
        super().load_optimizer_state(module, optimizer, saved)
        epoch = saved["state"].get(_STATE, {}).get("epoch", torch.tensor(0))
        value = epoch.read() if isinstance(epoch, StoredName) else epoch
        peer.epoch = int(value)
