"""The base of engines whose ranks hold shards that read as unsharded in user code.

Four of our engines share this wiring: user code between and inside of steps sees unsharded weights,
gradients and optimizer state; an optimizer's step, a checkpoint and the engine itself work on the shards;
and owner ranks step the parameters whose update reads more than one element.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from nnx_checkpoint.reading.state import ModelState, OptimizerState, describe_model, entries_of
from nnx_core.backend import Backend, OptionsT, ParallelContext
from nnx_core.optimizers.gradients import Gradient
from nnx_core.optimizers.unsharded_optimizer import OwnerRanks
from nnx_core.view.hidden_optimizer_state import HiddenStates, StateParts

T = TypeVar("T")


class View(Protocol):
    """Parameters, or optimizer state, that an optimizer's step sees otherwise than user code does."""

    def stepping(self) -> AbstractContextManager[Any]:
        """Return a context in which they are this rank's shards."""

    def user_code(self) -> AbstractContextManager[Any]:
        """Return a context within `stepping` in which they read as unsharded, for a closure."""


@contextmanager
def stepping(views: Iterable[View]) -> Iterator[None]:
    """Show this rank's shards, in order."""
    with ExitStack() as stack:
        for view in views:
            stack.enter_context(view.stepping())
        yield


def _for_user(views: Sequence[View], argument: Any) -> Any:
    """Return an argument of a step for use within `stepping`: a closure reads unsharded tensors."""
    if not callable(argument):
        return argument

    @wraps(argument)
    def closure(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for view in reversed(views):
                stack.enter_context(view.user_code())
            return argument(*args, **kwargs)

    return closure


class PartsBackend(Backend[OptionsT]):
    """A backend whose ranks hold shards. An engine adds `local`, `views`, and `state_parts`.

    Args:
        options: See `Backend`.
    """

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self._states = HiddenStates()
        self._owner_ranks: OwnerRanks

    def setup(self, context: ParallelContext) -> None:
        """Set the backend up for this rank, and make its owner ranks."""
        super().setup(context)
        self._owner_ranks = OwnerRanks(self.shard, context.device)

    @abstractmethod
    def local(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters and optimizer state are this rank's shards."""

    @abstractmethod
    def views(self, optimizer: Optimizer) -> Iterable[View]:
        """Return the parameters that an optimizer's step sees as this rank's shards."""

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
        views = [*self.views(optimizer), *self._states.of(optimizer)]
        for_user = partial(_for_user, views)
        args, kwargs = tuple(map(for_user, args)), {name: for_user(value) for name, value in kwargs.items()}
        with stepping(views):
            return self.step_shards(optimizer, step, *args, **kwargs)

    def step_shards(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step within `stepping`; owner ranks gather the parameters that they step."""
        return self._owner_ranks.step(optimizer, step, *args, **kwargs)

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on the local gradients, with the values that user code wrote into unsharded ones."""
        with stepping(self.views(optimizer)):
            return super().gradients(optimizer)

    def model_state(self, module: nn.Module) -> ModelState:
        """Handles on the shards."""
        entries = entries_of(module)  # by the module's own code, which sees weights unsharded
        with self.local():
            return describe_model(module, self.shard, entries)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the shards of the state, and on the unsharded state of owner ranks."""
        with self.local(), stepping(self._states.of(optimizer)):
            return self._owner_ranks.describe(module, optimizer)

    def own_optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the state that this rank holds, without communication."""
        with self.local(), stepping(self._states.of(optimizer)):
            return self._owner_ranks.describe(module, optimizer, alone=True)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the shards that this rank holds, and the state of parameters that it owns."""
        with self.local(), stepping(self._states.of(optimizer)):
            self._owner_ranks.load(self, module, optimizer, saved)
