"""What the backend needs of the two ways to hold chunks.

`LocalEngine` serves one process, `ShardedEngine` several, on FSDP2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from nnx.backend import ParallelContext
from nnx.layout import Shard
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.device.device import Device
from nnx_colossalai.plan.spec import Tier

__all__ = ["ChunkEngine", "Unit"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose parameters become one chunk.

    Attributes:
        name: Full name of the module; ``""`` for the root, which takes what no other unit has.
        module: The module; the chunk is needed while its forward and its backward run.
        parameters: By full name, those of the module that are in no unit inside of it. One object is in one
            unit.
        tier: Where the plan puts it.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    tier: Tier


class ChunkEngine(ABC):
    """Lays chunks out, gets them where a step needs them, and collects their gradients.

    Between steps ``module.parameters()`` are the masters and their ``grad``, where there is one, is complete,
    in the masters' dtype and memory. In a step with gradients the masters are back when backward has ended.

    Args:
        context: Where this process stands.
        device: Memory and copies.
        working_dtype: Of the weights that forward and backward compute with; None keeps the masters' own,
            which are then the working weights too in the tiers that are all on the device.
    """

    chunks: Sequence[Chunk]

    def __init__(
        self, context: ParallelContext, device: Device[Any], working_dtype: torch.dtype | None
    ) -> None:
        self.context, self.device, self.working_dtype = context, device, working_dtype
        self.chunks = ()

    @abstractmethod
    def parallelize(self, root: nn.Module, units: Sequence[Unit]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Lay the module out; see `nnx.Backend.parallelize`. The root's unit is the last."""

    @abstractmethod
    def unparallelize(self, root: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """See `nnx.Backend.unparallelize`; masters are what the module gets back."""

    @abstractmethod
    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """See `nnx.Backend.run_step`."""

    @abstractmethod
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        """See `nnx.Backend.no_sync`."""

    def backward_pass(self) -> AbstractContextManager[Any]:
        """Around a backward: gradients are complete at its end."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[Any]:
        """Around what works on this rank's part of masters, such as an optimizer's step."""
        return nullcontext()

    def for_user(self, argument: Any) -> Any:
        """Within `stepping`: an argument of an optimizer's step, whose closure is the user's code again."""
        return argument

    @abstractmethod
    def shard(self, tensor: torch.Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """See `nnx.Backend.shard`."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for whatever is pending: masters, gradients and working weights are complete then."""

    @abstractmethod
    def end_step(self) -> None:
        """An optimizer is about to step: show the masters, unless a forward or a backward is under way.

        A forward that no backward followed has left working weights in their places.
        """

    @abstractmethod
    def move(self, root: nn.Module, tiers: Mapping[str, Tier]) -> None:
        """Place chunks otherwise, between two steps; optimizer state is the caller's. Collective."""
