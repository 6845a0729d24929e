"""Strategies whose ranks train replicas of the model, and exchange weights at an interval.

Between exchanges a rank's gradients, clipping and optimizer state are its own. Evaluation and checkpoints see
the average of the replicas.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from nnx_base.ranks import all_gather_object, control_group, group_timeout, is_distributed
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.state import ModelState, OptimizerState, parameter_names
from nnx_comm.algorithm import mean_of
from nnx_comm.averaging import AsyncAverage, DiLoCo, LocalSGD, LowPrecision, ShiftOne, WeightExchange
from nnx_comm.backend import SlowLinkBackend, log
from nnx_comm.options import (
    AsyncOptions,
    DecentralizedOptions,
    DiLoCoOptions,
    LocalSGDOptions,
    LowPrecisionOptions,
    ReplicaOptions,
)
from nnx_comm.state import REPLICA
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.gradients import Gradient, gradients_of

__all__ = [
    "AsyncBackend",
    "DecentralizedBackend",
    "DiLoCoBackend",
    "LocalSGDBackend",
    "LowPrecisionBackend",
    "ReplicaBackend",
]

T = TypeVar("T")
ReplicaOptionsT = TypeVar("ReplicaOptionsT", bound=ReplicaOptions)


class ReplicaBackend(SlowLinkBackend[ReplicaOptionsT]):
    """Trains a replica on each rank, and exchanges weights after a step.

    Attributes:
        algorithm: The exchange.
        are_equal: True if all replicas have equal weights.
    """

    algorithm: WeightExchange
    are_equal: bool = True

    def __init__(self, options: ReplicaOptionsT) -> None:
        super().__init__(options)
        self._steps = 0
        self._average: dict[nn.Parameter, Tensor] | None = None
        self._hidden: dict[nn.Parameter, Tensor] | None = None

    @abstractmethod
    def make_algorithm(self) -> WeightExchange:
        """Return the algorithm of the options."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the weights to exchange.

        Raises:
            UnsupportedError: There are several optimizers, whose steps the interval would count twice.
            OptionError: The run has fewer steps than the interval.
        """
        super().setup_optimizers(module, optimizers)
        if len(optimizers) > 1:
            raise UnsupportedError(
                f"this strategy counts the steps of one optimizer, and there are {len(optimizers)}.",
                remedy="Use one optimizer with several param groups, or strategy='bagua'.",
            )
        option, interval = self.options.steps_between
        most = _steps_of_run(module) if optimizers else -1
        if 0 <= most < interval and not self.is_alone:
            raise OptionError(
                f"{option}={interval} is longer than this run of {most} steps, so that no rank would learn "
                "from another.",
                remedy=f"Pass a smaller {option}, or train longer.",
            )
        self._steps, self.are_equal, self._average, self._hidden = 0, True, None, None

    # A step

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Train this rank's replica; evaluate the average that `sync_buffers` has made."""
        if torch.is_grad_enabled():
            self._show_replica()
        elif self._average is not None and self._hidden is None:
            self._show_average(self._average)
        return step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step this rank's replica, and exchange weights if it is due. Collective then."""
        if self.is_alone:
            return step(*args, **kwargs)
        self._show_replica()
        weights = {p: p.detach() for group in optimizer.param_groups for p in group["params"] if p.numel()}
        self.algorithm.begin(weights)
        result = step(*args, **kwargs)
        self._steps += 1
        self.count(self.algorithm.exchange(weights, step=self._steps))
        self.are_equal = self.algorithm.are_equal
        return result

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return this rank's gradients, which no other rank has."""
        return gradients_of(optimizer, world_size=1)

    def clip_grad_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip this replica's gradients by their own norm, which it returns."""
        gradients = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_grad_norm_(gradients, max_norm, norm_type, error_if_nonfinite)

    # Evaluation

    def sync_buffers(self, module: nn.Module) -> None:
        """Make the average of the replicas for evaluation and saving. Collective."""
        super().sync_buffers(module)
        self.algorithm.finish()
        if not self.are_equal and self._hidden is None:
            self._average = self._mean_weights(module)

    @torch.no_grad()
    def _mean_weights(self, module: nn.Module) -> dict[nn.Parameter, Tensor]:
        return mean_of({p: p.detach() for p in module.parameters() if p.numel() and _is_trainable(p)})

    @torch.no_grad()
    def _show_average(self, average: dict[nn.Parameter, Tensor]) -> None:
        self._hidden = {parameter: parameter.detach().clone() for parameter in average}
        for parameter, mean in average.items():
            parameter.copy_(mean)

    @torch.no_grad()
    def _show_replica(self) -> None:
        """Undo `_show_average`, and forget the average: training changes it."""
        hidden, self._hidden, self._average = self._hidden, None, None
        for parameter, weight in (hidden or {}).items():
            parameter.copy_(weight)

    # State

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on the weights, or on their average if the replicas differ. Collective then."""
        if not self.are_equal and self._hidden is None and self._average is None:
            self._average = self._mean_weights(module)
        return super().model_state(module)

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the average of a parameter whose replicas differ, and other tensors as they are."""
        if self._average is not None and isinstance(tensor, nn.Parameter) and self._hidden is None:
            return shard_of(self._average.get(tensor, tensor))
        return shard_of(tensor)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Continue from the loaded weights on all ranks."""
        if optimizers:
            return
        if self._average is not None and self._hidden is None:
            self._show_average(self._average)
        self._hidden, self._average, self.are_equal = None, None, True
        self.algorithm.finish()
        self.algorithm.own.clear()
        self.algorithm.shared.clear()

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the optimizer's state, averaged if the replicas differ. Collective then."""
        self.algorithm.finish()
        if self._steps:
            self.algorithm.common["steps"] = torch.tensor(self._steps)
        state = super().optimizer_state(module, optimizer)
        if self._steps and not (self.is_loading or self.is_alone):
            # An exchange of weights leaves optimizer state as it is, so it differs from the first step on.
            self._average_state(state, parameter_names(module))
        return state

    def _average_state(self, state: OptimizerState, names: Mapping[nn.Parameter, str]) -> None:
        """Replace tensors of the optimizer's state by their averages, in the description."""
        own = {
            (name, key): shard.data[0]
            for name, entries in state["state"].items()
            if name in set(names.values())
            for key, shard in entries.items()
            if isinstance(shard, Shard) and shard.shape and shard.dtype.is_floating_point
        }
        everywhere = set.intersection(*map(set, all_gather_object(list(own), control_group())))
        stand_ins = {key: nn.Parameter(own[key], requires_grad=False) for key in own if key in everywhere}
        means = mean_of({stand_in: own[key] for key, stand_in in stand_ins.items()})
        for (name, key), stand_in in stand_ins.items():
            state["state"][name][key] = shard_of(means[stand_in])
        for name, key in set(own) - everywhere:  # other ranks have not stepped it
            del state["state"][name][key]

    def own_state(self, optimizer: Optimizer) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Return the algorithm's state of this rank, with its weights and optimizer state by option."""
        if self.options.replicas == "average":
            return {} if self.algorithm.own_is_of_replica else self.algorithm.own
        if self.is_alone or not self._steps:
            return self.algorithm.own
        own: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            weight = parameter if self._hidden is None else self._hidden.get(parameter, parameter)
            own[parameter] = {**self.algorithm.own.get(parameter, {}), f"{REPLICA}weight": weight.detach()}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape:
                    own[parameter][f"{REPLICA}state_{key}"] = value
        return own

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the optimizer, the algorithm, and this rank's replica if the checkpoint has it."""
        self.algorithm.finish()
        super().load_optimizer_state(module, optimizer, saved)
        self._steps = int(self.algorithm.common.get("steps", torch.tensor(0)))
        for parameter, entries in self.algorithm.own.items():
            self._take_replica(optimizer, parameter, entries)

    @torch.no_grad()
    def _take_replica(
        self, optimizer: Optimizer, parameter: nn.Parameter, entries: dict[str, Tensor]
    ) -> None:
        for key in [key for key in entries if key.startswith(REPLICA)]:
            value, name = entries.pop(key), key.removeprefix(REPLICA)
            if name == "weight":
                parameter.copy_(value)
                self.are_equal = False
            else:
                optimizer.state[parameter][name.removeprefix("state_")].copy_(value)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Leave the average of the replicas on all ranks. Collective if they differ."""
        if self._steps and not self.total:
            option, interval = self.options.steps_between
            log.warning("%s=%d is longer than this run: no rank learned from another", option, interval)
        if self._steps:
            self.algorithm.finish()
        if not self.are_equal and self._hidden is None:
            self._show_average(self._mean_weights(module))
        self._hidden, self._average, self.are_equal = None, None, True
        return {}


class LocalSGDBackend(ReplicaBackend[LocalSGDOptions]):
    """Averages the weights of all ranks at an interval."""

    Options = LocalSGDOptions

    def make_algorithm(self) -> WeightExchange:
        """Return the average at the interval of the options."""
        return LocalSGD(self.options.interval)


class DecentralizedBackend(ReplicaBackend[DecentralizedOptions]):
    """Averages the weights of all ranks, or of pairs."""

    Options = DecentralizedOptions

    def make_algorithm(self) -> WeightExchange:
        """Return the average over the peers of the options."""
        interval = self.options.communication_interval
        if self.options.peer_selection_mode == "all":
            return LocalSGD(interval)
        return ShiftOne(interval, ranks=self.context.world_size)


class LowPrecisionBackend(ReplicaBackend[LowPrecisionOptions]):
    """Averages weights with both neighbours on a ring, in bytes."""

    Options = LowPrecisionOptions

    def make_algorithm(self) -> WeightExchange:
        """Return the exchange at the interval of the options."""
        return LowPrecision(self.options.communication_interval)


class AsyncBackend(ReplicaBackend[AsyncOptions]):
    """Averages the weights of all ranks while they train."""

    Options = AsyncOptions
    _group: dist.ProcessGroup | None = None

    def make_algorithm(self) -> WeightExchange:
        """Return the average on a group of its own. Collective."""
        if not self.is_alone:
            self._group = dist.new_group(timeout=timedelta(seconds=group_timeout()))
        options = self.options
        return AsyncAverage(options.interval, staleness=options.staleness, group=self._group)

    def teardown(self) -> None:
        """Destroy the group."""
        if self._group is not None and is_distributed():
            dist.destroy_process_group(self._group)
        self._group = None
        super().teardown()


class DiLoCoBackend(ReplicaBackend[DiLoCoOptions]):
    """Steps with an outer SGD on the change of the average weights."""

    Options = DiLoCoOptions

    def make_algorithm(self) -> WeightExchange:
        """Return DiLoCo with the options."""
        return DiLoCo(self.options)


def _is_trainable(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _steps_of_run(module: nn.Module) -> int:
    """Return the optimizer steps of a Trainer's run; -1 if they are not limited, or under Fabric."""
    with suppress(AttributeError, RuntimeError):  # no LightningModule, or one without a Trainer
        return int(module.trainer.max_steps)  # type: ignore[union-attr, arg-type]
    return -1
