"""Faults in collectives, logs and the data of each rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torchmetrics import Metric

from faults import DECLARED, fault
from nnx import Capabilities
from nnx_tiny.backend import TinyBackend
from nnx_tiny.strategy import TinyStrategy


class CopiedModule(DDPStrategy):
    """Keeps a copy of the module after training, with its parameters."""

    def teardown(self) -> None:
        super().teardown()
        self._lightning_module = copy.copy(self._lightning_module)


class EveryRankZero(DDPStrategy):
    """Reports every rank as rank 0."""

    @property
    def is_global_zero(self) -> bool:
        return True


class RankZeroEverywhere(DDPStrategy):
    """Does not set the rank of `rank_zero_only`."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        rank_zero_only.rank = 0


class SumForMean(DDPStrategy):
    """Sums instead of averaging."""

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return super().reduce(tensor, group, "sum" if reduce_op in ("mean", "avg") else reduce_op)


class NotReduced(DDPStrategy):
    """Does not reduce numbers."""

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        is_logged = isinstance(reduce_op, str) and tensor.ndim == 0
        return tensor if is_logged else super().reduce(tensor, group, reduce_op)


class AlwaysReduced(DDPStrategy):
    """Overwrites every rank's metrics with rank 0's at the end of training."""

    def teardown(self) -> None:
        connector = self.lightning_module.trainer._logger_connector
        connector._callback_metrics = self.broadcast(dict(connector.callback_metrics))
        super().teardown()


class MetricsAlone(DDPStrategy):
    """Prevents the synchronization of torchmetrics."""

    def on_train_start(self) -> None:
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.distributed_available_fn = lambda: False


class GathersItself(DDPStrategy):
    """Repeats the rank's own tensor instead of gathering."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([tensor] * self.world_size)


class GathersWithoutGradient(DDPStrategy):
    """Ignores `sync_grads`."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        gathered = super().all_gather(tensor, group).detach()
        return gathered.requires_grad_() if sync_grads else gathered


class BroadcastsFromZero(DDPStrategy):
    """Ignores the source of a broadcast."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, 0)


class BroadcastsNothing(DDPStrategy):
    """Keeps each rank's own object."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


class LocalDecisions(DDPStrategy):
    """Lets each rank decide for itself."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class Unanimous(DDPStrategy):
    """Requires that all ranks agree, even with `all=False`."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return super().reduce_boolean_decision(decision, all=True)


class IsEasilyPersuaded(DDPStrategy):
    """Counts one yes as the yes of all ranks."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return super().reduce_boolean_decision(decision, all=False)


class NoBarrier(DDPStrategy):
    """Does not wait in barriers."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass


class SameWorkerSeeds(DDPStrategy):
    """Seeds the data workers of every rank like rank 0's."""

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return dataloader


class NotDistributed(TinyStrategy):
    """Does not report itself as distributed."""

    is_distributed = False


class DuplicatedShare(TinyBackend):
    """Lets every rank read the first share."""

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return 0, self.context.world_size


class _Sampling(DDPStrategy):
    """Changes the sampler that Lightning injected."""

    def process_dataloader(self, dataloader: Any) -> Any:
        sampler = getattr(dataloader, "sampler", None)
        if type(sampler) is DistributedSampler:
            self.meddle(sampler)
        return dataloader

    def meddle(self, sampler: DistributedSampler[Any]) -> None:
        raise NotImplementedError


class OneOrder(_Sampling):
    """Never sets the sampler's epoch."""

    def meddle(self, sampler: DistributedSampler[Any]) -> None:
        sampler.set_epoch = lambda epoch: None  # type: ignore[method-assign]


class OwnOrder(_Sampling):
    """Shuffles a shared data share differently on each rank."""

    distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012

    def meddle(self, sampler: DistributedSampler[Any]) -> None:
        sampler.seed += self.global_rank


class ShuffledValidation(_Sampling):
    """Shuffles validation data, too."""

    def meddle(self, sampler: DistributedSampler[Any]) -> None:
        sampler.shuffle = sampler.num_replicas == self.world_size  # Lightning's own


class TakesOver(_Sampling):
    """Treats every DistributedSampler as one of Lightning."""

    def meddle(self, sampler: DistributedSampler[Any]) -> None:
        if sampler.num_replicas == 3:
            sampler.__init__(sampler.dataset, self.world_size, self.global_rank, shuffle=False)  # type: ignore[misc]


class PaddedPredictions(DDPStrategy):
    """Pads prediction batches to an even size."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        predicted = super().predict_step(*args, **kwargs)
        return torch.cat([predicted, predicted[-1:]]) if len(predicted) % 2 else predicted


class InOrder(DDPStrategy):
    """Replaces unknown samplers."""

    def process_dataloader(self, dataloader: Any) -> Any:
        if isinstance(dataloader.sampler, (DistributedSampler, SequentialSampler)):
            return dataloader
        return DataLoader(dataloader.dataset, batch_size=dataloader.batch_size)


_LIKE_DDP = Capabilities(fabric=False, freezing_while_training=False, unused_parameters=False)

DECLARED |= {
    cls: _LIKE_DDP
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, (DDPStrategy, TinyStrategy)) and cls.__module__ == __name__
}

_NOT_SPLIT = ("validation_in_order", "predictions_once", "log_sync_dist")
_TWICE = ("distributed_sampler_kwargs", "samples_seen_once", "predictions_once", "fabric_samplers")

FAULTS = [
    fault("a copy of the module kept", CopiedModule, "trainer_returns_user_module"),
    fault("every rank is rank 0", EveryRankZero, "rank_properties"),
    fault("rank_zero_only everywhere", RankZeroEverywhere, "rank_zero_only_runs_once"),
    fault("a sum instead of the mean", SumForMean, "reduce_over_ranks", "log_sync_dist"),
    fault("logged values not reduced", NotReduced, "log_sync_dist"),
    fault("all metrics are rank 0's", AlwaysReduced, "log_without_sync_dist"),
    fault("torchmetrics of one rank", MetricsAlone, "torchmetrics_reduced"),
    fault("nothing gathered", GathersItself, "all_gather", "all_gather_with_gradients"),
    fault("gathered without gradient", GathersWithoutGradient, "all_gather_with_gradients"),
    fault("broadcast from rank 0 only", BroadcastsFromZero, "broadcast"),
    fault("nothing broadcast", BroadcastsNothing, "broadcast"),
    fault("decisions of one rank", LocalDecisions, "reduce_boolean_decision", "early_stopping_on_one_rank"),
    fault("one yes is enough", IsEasilyPersuaded, "reduce_boolean_decision"),
    fault("only unanimous decisions", Unanimous, "early_stopping_on_one_rank", "reduce_boolean_decision"),
    fault("no barrier", NoBarrier, "barrier"),
    fault("data workers seeded alike", SameWorkerSeeds, "data_workers_seeded"),
    fault("a strategy without is_distributed", NotDistributed, "samples_seen_once", *_NOT_SPLIT),
    fault("samples duplicated", DuplicatedShare, "distributed_sampler_kwargs", *_TWICE),
    fault("samples duplicated in Fabric", DuplicatedShare, "fabric_samplers", *_TWICE),
    fault("one order in all epochs", OneOrder, "samples_shuffled"),
    fault("one share in different orders", OwnOrder, "same_data_rank_same_samples", "data_workers_seeded"),
    fault("validation shuffled", ShuffledValidation, "validation_in_order"),
    fault("a user's DistributedSampler taken over", TakesOver, "user_distributed_sampler"),
    fault("predictions padded", PaddedPredictions, "predictions_once"),
    fault("a user's sampler replaced", InOrder, "user_sampler"),
]
