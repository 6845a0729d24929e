"""The base of engines whose ranks hold shards that read as unsharded in user code.

Four of our engines share this wiring: user code between and inside of steps sees unsharded weights,
gradients and optimizer state; an optimizer's step, a checkpoint and the engine itself work on the shards;
and owner ranks step the parameters whose update reads more than one element.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from nnx_checkpoint.reading.state import ModelState, OptimizerState, describe_model, entries_of
from nnx_core.backend import Backend, OptionsT, ParallelContext
from nnx_core.optimizers.gradients import Gradient
from nnx_core.optimizers.whole_matrix import OwnerRanks
from nnx_core.view.hidden_state import HiddenStates, StateParts

T = TypeVar("T")


class PartsBackend(Backend[OptionsT]):
    """A backend whose ranks hold shards. An engine adds `local`, `for_user`, and `state_parts`.

    Args:
        options: See `Backend`.
    """

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self._states = HiddenStates()
        self._owner_ranks: OwnerRanks

    def setup(self, context: ParallelContext) -> None:
        """Take this rank's place."""
        super().setup(context)
        self._owner_ranks = OwnerRanks(self.shard, context.device)

    @abstractmethod
    def local(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters and optimizer state are this rank's shards."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return the context of an optimizer's step, and of reading its gradients: by default `local`."""
        return self.local()

    @abstractmethod
    def for_user(self, optimizer: Optimizer, argument: Any) -> Any:
        """Return an argument of a step for use within `stepping`: a closure that sees unsharded weights."""

    def state_parts(self, module: nn.Module) -> StateParts | None:
        """Return how the optimizer state of a module reads as unsharded; None leaves it visible as it is."""
        return None

    def state_refusal(self, optimizer: Optimizer) -> str | None:
        """Return the reason why user code cannot read an optimizer's state; None if it can."""
        return self._owner_ranks.refusal(optimizer)

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Choose owner ranks, and let optimizer state read as unsharded. Collective."""
        self._owner_ranks.setup(optimizers)
        parts = self.state_parts(module)
        for optimizer in optimizers if parts is not None else ():
            self._states.hide(optimizer, parts=parts)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step on shards; its closure, as user code, sees unsharded weights and state."""
        seen = partial(self._seen, optimizer)
        args, kwargs = tuple(map(seen, args)), {name: seen(value) for name, value in kwargs.items()}
        with self.stepping(optimizer), self._states.shown(optimizer):
            return self.step_shards(optimizer, step, *args, **kwargs)

    def _seen(self, optimizer: Optimizer, argument: Any) -> Any:
        return self.for_user(optimizer, self._states.for_user(optimizer, argument))

    def step_shards(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step within `stepping`; owner ranks gather the parameters that they step."""
        return self._owner_ranks.step(optimizer, step, *args, **kwargs)

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on the local gradients, with the values that user code wrote into unsharded ones."""
        with self.stepping(optimizer):
            return super().gradients(optimizer)

    def model_state(self, module: nn.Module) -> ModelState:
        """Handles on the shards."""
        entries = entries_of(module)  # by the module's own code, which sees weights unsharded
        with self.local():
            return describe_model(module, self.shard, entries)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the shards of the state, and on the unsharded state of owner ranks."""
        with self.local(), self._states.shown(optimizer):
            return self._owner_ranks.describe(module, optimizer)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the shards that this rank holds, and the state of parameters that it owns."""
        with self.local(), self._states.shown(optimizer):
            self._owner_ranks.load(self, module, optimizer, saved)
