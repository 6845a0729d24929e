"""`nnx.compare_ranks`: the watch as a callback, for Trainer under any strategy.

nnx's strategies have the option ``check_every`` for it and call `nnx_core.watch.Watch` themselves: there the
callback sets how often. Under Lightning's own, whose modules hold plain tensors or DTensors, it compares.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nnx_core.backend import Backend, NoOptions, Sample
from nnx_core.errors import OptionError
from nnx_core.gradients import Gradient, gradients_of
from nnx_core.lightning.namespaces import trainer_tree
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.watch import Watch


class _AsItIs(Backend[NoOptions]):
    """Describes a module that another program has laid out."""

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        return gradients_of(optimizer, world_size=dist.get_world_size())


class RankComparison:
    """Mixin of a callback that compares the ranks while they train.

    Attributes:
        root: The tree of Lightning whose callback this is.
        every: After how many steps.
    """

    root: str
    every: int
    _watch: Watch | None = None
    _steps = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made for one tree, so a spawned process makes it again."""
        return (_make, (self.root, self.every))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to count steps."""
        self._watch, self._steps = None, trainer.global_step
        if isinstance(trainer.strategy, ParallelProcesses):
            trainer.strategy.watch = Watch(trainer.strategy.backend, every=self.every)
        elif stage == "fit":
            self._watch = Watch(_AsItIs(NoOptions()), every=self.every)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Compare the ranks if the batch ended a step and it is time. Collective."""
        if self._watch is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._watch.after_step(pl_module, lambda: trainer.optimizers)


def compare_ranks(*, every: int = 100) -> Any:
    """A callback that compares over the ranks what they must have in common, and names what differs.

    Args:
        every: After how many steps; also after each of the first two.

    Raises:
        OptionError: `every` is not a positive number.

    Example:
        ``Trainer(strategy="ddp", callbacks=[nnx.compare_ranks(every=100)])``
    """
    if every < 1:
        raise OptionError(f"every={every!r} is not a number of steps.", remedy="Pass, say, 100.")
    return _make(trainer_tree(), every)


def _make(root: str, every: int) -> Any:
    base = importlib.import_module(f"{root}.callbacks").Callback
    return type("NnxRankComparison", (RankComparison, base), {"root": root, "every": every})()
