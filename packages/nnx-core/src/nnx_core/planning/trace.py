"""Describe one training step of a model on one process: every tensor, in the order of its life.

`record` makes a `Trace`, and `replay` computes what a rank of a strategy stores. The order is Lightning's:
forward, ``zero_grad``, backward, optimizer step. So the gradients of the step before are there during the
forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["Event", "Kind", "OptimizerCost", "Parameter", "Trace"]


class Kind(Enum):
    """A kind of event.

    ``MAKE`` and ``FREE`` are of a storage. ``USE``, ``SAVE`` and ``UNSAVE`` are of a parameter: an operator
    reads it, autograd keeps it for backward, autograd no longer keeps it. ``GRADIENT`` is of a complete
    gradient. The others are of a module or a phase.
    """

    MAKE = "make"
    FREE = "free"
    USE = "use"
    SAVE = "save"
    UNSAVE = "unsave"
    GRADIENT = "gradient"
    ENTER = "enter"
    LEAVE = "leave"
    ENTER_BACKWARD = "enter backward"
    LEAVE_BACKWARD = "leave backward"
    PHASE = "phase"


class Event(NamedTuple):
    """An event of a step.

    Attributes:
        kind: The kind.
        name: The parameter, the module or the phase.
        storage: The number of the storage; -1 without one.
        nbytes: The bytes of the storage.
    """

    kind: Kind
    name: str = ""
    storage: int = -1
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model.

    Attributes:
        name: Its first name in the model.
        shape: Its shape.
        itemsize: The bytes of an element.
        trained: True if it requires gradients.
        state: The bytes of optimizer state that has the parameter's size.
        scalars: The bytes of optimizer state of any other size.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool = True
    state: int = 0
    scalars: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.itemsize

    def shard_nbytes(self, ranks: int) -> int:
        """Return the bytes of the largest shard, if ranks share the rows of the first dim."""
        if not self.shape:
            return self.nbytes
        return math.ceil(self.shape[0] / ranks) * math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """The temporary bytes of an optimizer's step, as a function of the tensors that it steps.

    Attributes:
        of_sum: The factor of the bytes of all parameters: 1 and more where lists are updated together.
        of_largest: The factor of the bytes of the largest parameter.
    """

    of_sum: float = 0.0
    of_largest: float = 0.0

    def temporary(self, total: int, largest: int) -> int:
        """Return the temporary bytes for parameters of `total` bytes, of which one has `largest`."""
        return round(self.of_sum * total + self.of_largest * largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One training step of a model on one process.

    Attributes:
        events: The events of forward and backward, in order.
        parameters: The parameters by name, in the model's order.
        module: The model with all layers and without memory, for engines that choose units.
        buffers: The bytes of all buffers.
        batch: The bytes of the batch.
        batch_size: The number of samples of the batch.
        optimizer: The temporary bytes of the optimizer's step.
        optimizer_name: The class of the optimizer.
        precision: Lightning's precision string.
        source: ``"traced"``, or ``"formula"`` if the model could not be traced.
        notes: Sentences about the trace for the user.
    """

    events: tuple[Event, ...]
    parameters: Mapping[str, Parameter]
    module: Any = field(default=None, compare=False, repr=False)
    buffers: int = 0
    batch: int = 0
    batch_size: int = 1
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)
    optimizer_name: str = ""
    precision: str = "32-true"
    source: str = "traced"
    notes: tuple[str, ...] = ()
