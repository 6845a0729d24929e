"""Faults with one module that goes through several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from faults import Fault
from faults.stages.weights import Weights, set_weights, weights_of
from nnx_tiny.backend import TinyBackend


class FreezesForEvaluation(TinyBackend):
    """Turns gradients off to evaluate, and not on again."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            module.requires_grad_(False)


_first: WeakKeyDictionary[nn.Module, Weights] = WeakKeyDictionary()


class _Remembers(TinyBackend):
    """Keeps each module's first weights, as an engine would that compiles or flattens them once."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.runs = 0

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        replaced = super().parallelize(module, sample)
        _first.setdefault(module, weights_of(module))
        self.runs += 1
        return replaced

    def restore(self, module: nn.Module) -> None:
        set_weights(module, _first[module])


class EvaluatesOldWeights(_Remembers):
    """A new engine evaluates with the weights that the module had when it was first seen."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and self.runs == 1:
            self.restore(module)


class EvaluatesItsFirstWeights(_Remembers):
    """The same engine evaluates with the weights that the module had when training started."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and self.runs > 1:
            self.restore(module)


class TrainsFromTheStart(_Remembers):
    """A new engine trains from the weights that the module had when it was first seen."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and self.runs == 1:
            self.restore(module)


class TrainsFromItsFirstWeights(_Remembers):
    """The same engine trains from the weights that the module had when its first training started."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and self.runs > 1:
            self.restore(module)


class TrainsFromTheFirstEvaluation(TinyBackend):
    """Training takes up the weights of the module's first evaluation."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            _first.setdefault(module, weights_of(module))
        elif module in _first:
            set_weights(module, _first[module])


_HERE = "faults.stages.runs"

FAULTS = [
    Fault(
        name="evaluation freezes the module for good",
        target=f"{_HERE}:FreezesForEvaluation",
        caught_by="evaluation_before_fit",
        also=(
            "evaluation_computes_no_gradients",
            "evaluation_takes_the_eval_branch",
            "training_takes_the_training_branch_again",
        ),
    ),
    Fault(
        name="a new engine evaluates the module's first weights",
        target=f"{_HERE}:EvaluatesOldWeights",
        caught_by="evaluation_after_fit",
        also=("other_batch_size_in_evaluation",),
    ),
    Fault(
        name="the engine that trained evaluates the weights it started from",
        target=f"{_HERE}:EvaluatesItsFirstWeights",
        caught_by="evaluation_with_the_same_trainer",
        also=("limited_batches",),
    ),
    Fault(
        name="a second fit starts from the initial weights",
        target=f"{_HERE}:TrainsFromTheStart",
        caught_by="fit_again",
    ),
    Fault(
        name="more steps of the same Trainer start from the initial weights",
        target=f"{_HERE}:TrainsFromItsFirstWeights",
        caught_by="fit_further",
    ),
    Fault(
        name="a fit goes on from the weights of the first evaluation",
        target=f"{_HERE}:TrainsFromTheFirstEvaluation",
        caught_by="any_order",
    ),
]
