"""Define a chunk: the parameters of one layer, which are placed, fetched, stepped and refreshed together.

Between steps the user's module holds the master weights, or *masters*, in float32 under a mixed precision.
Optimizers, checkpoints, callbacks and clipping see them. Within a step, from a unit's forward to the end of
the backward, the module computes with *working* weights in the dtype of the precision. At world size 1 both
are the user's own parameter objects, whose ``data`` changes. Above it masters are DTensors, and FSDP2 gathers
the working weights.

`Chunk` and `ChunkEngine` are the interface of both engines. The functions search the nested inputs and
outputs of modules for tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_colossalai.device import Device
from nnx_colossalai.plan.spec import Tier
from nnx_core._torch_compat import tree_map_only
from nnx_core.backend import ParallelContext
from nnx_core.parts_backend import View
from nnx_core.view.hidden_optimizer_state import StateParts

__all__ = [
    "Chunk",
    "ChunkEngine",
    "Unit",
    "cast_to",
    "is_transparent",
    "kept_outputs",
    "needs_no_backward",
    "tensors_with_gradient",
]


class Chunk(ABC):
    """One chunk of a model, in the memory of its tier.

    Attributes:
        index: The position in the order in which the last forward used the chunks.
        name: The name in the plan.
        tier: The tier in the plan.
        masters: The parameters that the module and the optimizers hold between steps, by full name.
    """

    index: int
    name: str
    tier: Tier
    masters: Mapping[str, nn.Parameter]

    @abstractmethod
    def refresh(self) -> None:
        """Copy changed masters to the working weights.

        The thread that has stepped the masters calls it. The copy may outlast the call; the next use of the
        chunk waits for it.
        """

    @abstractmethod
    def set_pending(self, wait: Callable[[], None] | None) -> None:
        """Make the next use of the chunk's masters or working weights call `wait`; None removes it.

        A background step sets it for each of its chunks before ``optimizer.step()`` returns. The next
        forward, checkpoint or callback that uses the chunk calls it once.
        """


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose parameters become one chunk.

    Attributes:
        name: The full name of the module; ``""`` for the root, which has the parameters of no other unit.
        module: The module; its forward and its backward need the chunk.
        parameters: The parameters that are in no inner unit, by full name; each is in one unit only.
        tier: The tier in the plan.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    tier: Tier


class ChunkEngine(ABC):
    """Places chunks, fetches them for a step, and collects their gradients.

    `LocalEngine` does so at world size 1, `ShardedEngine` above it with FSDP2.

    Between steps ``module.parameters()`` are the masters, and every gradient is complete, in the dtype and
    memory of its master. A step with gradients restores the masters at the end of its backward.

    Args:
        context: The rank of this process and the world size.
        device: The device that allocates and copies.
        working_dtype: The dtype of the weights that forward and backward compute with. None keeps the
            masters' dtype; masters on the device are then the working weights too.

    Attributes:
        chunks: The chunks of the module.
        at_end: The attribute of `nnx_core.backend.Backend`; by default every rank keeps the masters.
        is_watched: True if the ranks are compared after this step.
    """

    chunks: Sequence[Chunk]
    at_end: Callable[..., Tensor]
    is_watched: bool = False

    def __init__(
        self, context: ParallelContext, device: Device[Any], working_dtype: torch.dtype | None
    ) -> None:
        self.context, self.device, self.working_dtype = context, device, working_dtype
        self.at_end = lambda gather, *, shape, dtype: gather().cpu()
        self.chunks = ()

    @abstractmethod
    def parallelize(self, root: nn.Module, units: Sequence[Unit]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Put the module into chunks, as `nnx.Backend.parallelize` does; the root's unit is the last."""

    @abstractmethod
    def unparallelize(self, root: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Restore plain parameters with the masters' values, as `nnx.Backend.unparallelize` does."""

    @abstractmethod
    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step with working weights, as `nnx.Backend.run_step` does."""

    @abstractmethod
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients without reducing them, as `nnx.Backend.no_sync` does."""

    def backward_pass(self) -> AbstractContextManager[Any]:
        """Context manager for a backward; all gradients are complete at its end."""
        return nullcontext()

    def views(self) -> Iterable[View]:
        """Return the parameters that an optimizer's step sees as this rank's shards; none at world size 1."""
        return ()

    def written(self, root: nn.Module) -> Mapping[str, int]:
        """Return checksums of user code's writes, as `nnx.Backend.written` does."""
        return {}

    def state_parts(self, refusal: Callable[[Optimizer], str | None]) -> StateParts | None:
        """Return an object that shows user code unsharded optimizer state; None if no state is sharded.

        Args:
            refusal: The argument of `nnx_core.view.hidden_optimizer_state.StateParts`.
        """
        return None

    @abstractmethod
    def finish(self) -> None:
        """Wait until masters, gradients and working weights are complete."""

    @abstractmethod
    def end_step(self) -> None:
        """Show the masters before an optimizer steps, unless a forward or a backward is running.

        A forward without a backward has left working weights in the module.
        """

    @abstractmethod
    def move(self, root: nn.Module, tiers: Mapping[str, Tier]) -> None:
        """Move chunks to other tiers, between two steps; the caller moves optimizer state. Collective."""


def cast_to(dtype: torch.dtype, value: Any) -> Any:
    """Return a nested value with its floating-point tensors cast to a dtype.

    Example:
        >>> cast_to(torch.bfloat16, (torch.ones(1), torch.tensor([2]), "three"))
        (tensor([1.], dtype=torch.bfloat16), tensor([2]), 'three')
    """
    # The usual values first: mapping over any other value takes longer than a small kernel.
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple([cast_to(dtype, one) for one in value])
    if type(value) is dict and not value:
        return value
    return tree_map_only(Tensor, partial(cast_to, dtype), value)


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value that require gradients.

    Example:
        >>> len(tensors_with_gradient({"loss": torch.ones(1, requires_grad=True), "size": (1, "two")}))
        1
    """
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def needs_no_backward(value: Any) -> bool:
    """Return True if nothing in a nested value can start a backward; objects of unknown classes may.

    Example:
        >>> needs_no_backward(None), needs_no_backward([torch.ones(1), 0.5]), needs_no_backward(object())
        (True, True, False)
    """
    return is_transparent(value) and not tensors_with_gradient(value)


def is_transparent(value: Any) -> bool:
    """Return True if all tensors in a nested value are found: there are no objects of unknown classes."""
    return all(isinstance(leaf, (Tensor, int, float, str, type(None))) for leaf in _leaves(value))


def kept_outputs(module: nn.Module) -> list[Tensor]:
    """Return tensors with a graph that a forward has left on modules, such as an auxiliary loss.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.penalty = layer.weight.square().sum()
        >>> [tensor.ndim for tensor in kept_outputs(nn.Sequential(layer))]
        [0]
    """
    return [
        value
        for one in module.modules()
        for value in vars(one).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _leaves(getattr(value, part.name, None))
    else:
        yield value
