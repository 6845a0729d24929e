"""Engines that do not compare user writes over the ranks; only workers import this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from nnx_core.options import option
from nnx_core.view.guard import unguard
from nnx_deepspeed.backend import DeepSpeedBackend
from nnx_deepspeed.options import DeepSpeedOptions
from nnx_fairscale.fsdp import FairscaleFSDPBackend
from nnx_fairscale.oss import OSSBackend
from nnx_fairscale.sharded import ShardedBackend
from nnx_fsdp.backend import FSDPBackend


class _Forgets:
    def written(self, module: nn.Module) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True, kw_only=True)
class _Stage3(DeepSpeedOptions):
    stage: int = option(3, help="Parameters too.")


@dataclass(frozen=True, kw_only=True)
class _AllCut(_Stage3):
    persistence_threshold: int = option(0, help="None stays whole.")


class CopiesOfDeepSpeed(_Forgets, DeepSpeedBackend):
    """Makes the ranks' copies equal."""


class PersistentOfDeepSpeed(_Forgets, DeepSpeedBackend):
    """Makes the ranks' copies of persistent parameters equal."""

    Options = _Stage3


class PartitionsOfDeepSpeed(_Forgets, DeepSpeedBackend):
    """Keeps each rank's own partition after a write."""

    Options = _AllCut


class UnguardedPartitionsOfDeepSpeed(DeepSpeedBackend):
    """Shows user code DeepSpeed's remainder of a partitioned parameter."""

    Options = _AllCut

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().setup_optimizers(module, optimizers)
        for parameter in module.parameters():
            unguard(parameter)


class CopiesOfOSS(_Forgets, OSSBackend):
    """Broadcasts the owners' copies."""


class CopiesOfSharded(_Forgets, ShardedBackend):
    """Broadcasts the owners' copies."""


class UnitsOfFairscale(_Forgets, FairscaleFSDPBackend):
    """Keeps each rank's own shard after a write."""


class UnitsOfFSDP(_Forgets, FSDPBackend):
    """Keeps each rank's own shard after a write."""
