"""Faults in where a run ends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from faults import Fault


class TrainsAnEpochMore(DDPStrategy):
    """Counts epochs from one."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if (trainer.fit_loop.max_epochs or 0) > 0:
            trainer.fit_loop.max_epochs += 1  # type: ignore[operator]


class IgnoresLimits(DDPStrategy):
    """Reads training data to the end."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        trainer.limit_train_batches = 1.0


class DecidesAlone(DDPStrategy):
    """Lets every rank decide for itself."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class DecidesByMinority(DDPStrategy):
    """Takes it for one rank's decision only if just one has taken it."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = torch.tensor(int(decision))
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count == 1)


_HERE = "faults.stages.ending"

FAULTS = [
    Fault(
        name="one epoch too many",
        target=f"{_HERE}:TrainsAnEpochMore",
        caught_by="epochs_end",
        also=("empty_validation", "limited_batches"),
    ),
    Fault(
        name="limits of batches are ignored",
        target=f"{_HERE}:IgnoresLimits",
        caught_by="limited_batches",
    ),
    Fault(
        name="each rank decides alone when to stop",
        target=f"{_HERE}:DecidesAlone",
        caught_by="one_rank_stops_all",
    ),
    Fault(
        name="all ranks together cannot stop",
        target=f"{_HERE}:DecidesByMinority",
        caught_by="early_stopping",
    ),
]
