"""A chunk: the parameters of one layer, which are placed, fetched, stepped and refreshed together.

Between steps the user's module holds the *masters*: what optimizers, checkpoints, callbacks and clipping see,
in float32 under a mixed precision. Within a step, from a unit's forward to the end of the backward, it
computes with *working* weights of the precision's dtype. At world size 1 both are the user's own parameter
objects, whose ``data`` changes; above it masters are DTensors and working weights are FSDP2's.
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
    """One chunk of a model that is laid out.

    Attributes:
        index: Place in the order in which the last forward used the chunks.
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
        """Make the working weights equal to the masters again, which were changed; may end after the return.

        Called by whichever thread has stepped the masters. The next use of the chunk waits for it.
        """

    @abstractmethod
    def set_pending(self, wait: Callable[[], None] | None) -> None:
        """What to call before the chunk's masters or working weights are used next; None: nothing.

        An optimizer that steps in the background sets it for every chunk, before it returns. Whoever uses
        the chunk next (a forward, the checkpoint, a callback that reads a parameter) calls it once.
        """


# What the backend needs of the two ways to hold chunks.
#
# `LocalEngine` serves one process, `ShardedEngine` several, on FSDP2.


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose parameters become one chunk.

    Attributes:
        name: Full name of the module; ``""`` for the root, which takes what no other unit has.
        module: The module; the chunk is needed while its forward and its backward run.
        parameters: By full name, those of the module that are in no unit inside of it. One object is in one
            unit.
        tier: The tier that the plan puts it in.
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
        context: The place of this process in the world.
        device: Memory and copies.
        working_dtype: The dtype of the weights that forward and backward compute with; None keeps the
            masters' own, which are then the working weights too in the tiers that are all on the device.

    Attributes:
        chunks: The chunks of the module that is laid out.
        at_end: `nnx_core.backend.Backend.at_end`; by default every rank keeps the masters.
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

    def views(self) -> Iterable[View]:
        """Return the parameters that an optimizer's step sees as this rank's shards: none on one rank."""
        return ()

    def written(self, root: nn.Module) -> Mapping[str, int]:
        """See `nnx.Backend.written`."""
        return {}

    def state_parts(self, refusal: Callable[[Optimizer], str | None]) -> StateParts | None:
        """How optimizers' state is shown whole to user code; None if this rank has all of it.

        Args:
            refusal: As of `nnx_core.view.hidden_optimizer_state.StateParts`.
        """
        return None

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


# Tensors inside of what modules and steps are given and return.


def cast_to(dtype: torch.dtype, value: Any) -> Any:
    """A nested value with its floating-point tensors at another dtype.

    Example:
        >>> cast_to(torch.bfloat16, (torch.ones(1), torch.tensor([2]), "three"))
        (tensor([1.], dtype=torch.bfloat16), tensor([2]), 'three')
    """
    # The usual first: looking into any value takes longer than a small kernel.
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple([cast_to(dtype, one) for one in value])
    if type(value) is dict and not value:
        return value
    return tree_map_only(Tensor, partial(cast_to, dtype), value)


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """The tensors in a nested value that require gradients.

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
    """What a forward has left on modules beside its result, such as an auxiliary loss, to be used in another.

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
