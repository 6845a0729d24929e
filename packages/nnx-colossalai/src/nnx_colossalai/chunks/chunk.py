"""A chunk: the parameters of one layer, which are placed, fetched, stepped and refreshed together.

Between steps the user's module holds the *masters*: what optimizers, checkpoints, callbacks and clipping see,
in float32 under a mixed precision. Within a step, from a unit's forward to the end of the backward, it
computes with *working* weights of the precision's dtype. At world size 1 both are the user's own parameter
objects, whose ``data`` changes; above it masters are DTensors and working weights are FSDP2's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import nn

from nnx_colossalai.plan.spec import Tier

__all__ = ["Chunk"]


class Chunk(ABC):
    """One chunk of a model that is laid out.

    Attributes:
        index: Place in the order in which the last forward used the chunks.
        name: As in the plan.
        tier: As in the plan.
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
