"""Faults in the stages of a run: what evaluation and training do to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import Fault
from nnx_tiny.backend import TinyBackend

Weights = dict[str, Tensor]
Step = Callable[..., Any]


def weights_of(module: nn.Module) -> Weights:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def set_weights(module: nn.Module, weights: Weights) -> None:
    """Overwrite the parameters."""
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])


# --- one module through several runs ------------------------------------------------------------------


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


# --- evaluation within fit ----------------------------------------------------------------------------


class _Evaluates(TinyBackend):
    """Tells steps of evaluation from those of training."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.train(module, step, *args, **kwargs)
        return self.evaluate(module, step, *args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)


class StaleValidation(_Evaluates):
    """Evaluates with a copy of the weights that is made once."""

    copy: Weights | None = None

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        current = weights_of(module)
        self.copy = self.copy or current
        set_weights(module, self.copy)
        try:
            return step(*args, **kwargs)
        finally:
            set_weights(module, current)


class StaleAfterValidation(_Evaluates):
    """After validation training goes on from the weights that the first validation saw."""

    before: Weights | None = None

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.before = self.before or weights_of(module)
        return step(*args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            set_weights(module, self.before)
        return step(*args, **kwargs)


class DropsGradientsInValidation(_Evaluates):
    """Evaluation throws away what gradients there are."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters():
            parameter.grad = None
        return step(*args, **kwargs)


class EvaluatesTheTrainingBranch(_Evaluates):
    """Evaluates what it traced in training mode."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train()
        try:
            return step(*args, **kwargs)
        finally:
            module.eval()


class StaysInEvaluation(_Evaluates):
    """Once it has evaluated, it stays in evaluation mode."""

    has_evaluated = False

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.has_evaluated = True
        return step(*args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train(not self.has_evaluated)
        return step(*args, **kwargs)


class TrainsEveryModule(_Evaluates):
    """Puts the whole module into training mode before each step, whatever the user did."""

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train()
        return step(*args, **kwargs)


class EvaluatesWithGradients(_Evaluates):
    """Evaluates as it trains, with gradients."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return step(*args, **kwargs)


class LeavesInferenceTensors(_Evaluates):
    """Puts what it made in inference mode into the module."""

    evaluation_without_inference_mode = False

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part._parameters[name] = nn.Parameter(parameter.clone())
        return step(*args, **kwargs)


class GathersPredictions(_Evaluates):
    """Returns the predictions of all ranks on each."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if step.__name__ != "predict_step" or self.context.world_size == 1:
            return result
        parts = [torch.empty_like(result) for _ in range(self.context.world_size)]
        dist.all_gather(parts, result)
        return torch.cat(parts)


# --- batches ------------------------------------------------------------------------------------------


class _Batches(TinyBackend):
    """Does something to each batch; steps get it as their first argument."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        return step(self.changed(batch), *rest, **kwargs)

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class PadsBatches(_Batches):
    """Fills a smaller batch up to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        self.size = self.size or len(batch[0])
        missing = max(0, self.size - len(batch[0]))
        return [torch.cat([part, part[:1].expand(missing, -1)]) for part in batch]


class CutsBatches(_Batches):
    """Cuts a larger training batch down to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        if torch.is_grad_enabled():
            self.size = self.size or len(batch[0])
            return [part[: self.size] for part in batch]
        return batch


class CutsBatchesInEvaluation(_Batches):
    """Evaluates at most as many samples as it was built for."""

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        return batch if torch.is_grad_enabled() else [part[:6] for part in batch]


class SkipsSingleSamples(TinyBackend):
    """Takes a batch of one sample for an accident, and does not train with it."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        return result * 0.0 if torch.is_grad_enabled() and len(args[0][0]) == 1 else result


class WeighsBySamples(TinyBackend):
    """Weighs the ranks' gradients by their numbers of samples."""

    share = 1.0

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        count = torch.tensor(float(len(args[0][0])))
        total = count.clone()
        dist.all_reduce(total)
        self.share = (count / total * self.context.world_size).item()
        return step(*args, **kwargs)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.share, *args, **kwargs)


class PeeksAtLoaders(DDPStrategy):
    """Looks at the first batch of every loader."""

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, torch.utils.data.DataLoader):
            _, *_ = dataloader
        return dataloader


# --- the end of a run ---------------------------------------------------------------------------------


class TrainsAnEpochMore(DDPStrategy):
    """Counts epochs from one."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if (trainer.fit_loop.max_epochs or 0) > 0:
            trainer.fit_loop.max_epochs += 1  # type: ignore[operator]


class IgnoresLimits(DDPStrategy):
    """Reads training data to the end."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        trainer.limit_train_batches = 1.0


class DecidesAlone(DDPStrategy):
    """Lets every rank decide for itself."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class DecidesByMinority(DDPStrategy):
    """Takes it for one rank's decision only if just one has taken it."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = torch.tensor(int(decision))
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count == 1)


_HERE = "faults.stages"

FAULTS = [
    Fault(
        name="evaluation freezes the module for good",
        target=f"{_HERE}:FreezesForEvaluation",
        caught_by="evaluation_before_fit",
        also=("evaluation_computes_no_gradients", "training_takes_the_training_branch_again"),
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
    Fault(
        name="validation uses a copy of the weights made once",
        target=f"{_HERE}:StaleValidation",
        caught_by="validation_sees_current_weights",
        also=("evaluation_takes_the_eval_branch", "smaller_last_batch", "limited_batches"),
    ),
    Fault(
        name="stale weights after validate",
        target=f"{_HERE}:StaleAfterValidation",
        caught_by="validation_leaves_training_alone",
        also=(
            "validation_sees_current_weights",
            "validation_while_gradients_accumulate",
            "evaluation_takes_the_eval_branch",
            "training_takes_the_training_branch_again",
            "smaller_last_batch",
            "limited_batches",
        ),
    ),
    Fault(
        name="validation drops accumulated gradients",
        target=f"{_HERE}:DropsGradientsInValidation",
        caught_by="validation_while_gradients_accumulate",
    ),
    Fault(
        name="evaluation takes the training branch",
        target=f"{_HERE}:EvaluatesTheTrainingBranch",
        caught_by="evaluation_takes_the_eval_branch",
    ),
    Fault(
        name="training stays in evaluation mode after validation",
        target=f"{_HERE}:StaysInEvaluation",
        caught_by="training_takes_the_training_branch_again",
        also=("evaluation_takes_the_eval_branch", "submodules_keep_their_mode"),
    ),
    Fault(
        name="every step puts all submodules into training mode",
        target=f"{_HERE}:TrainsEveryModule",
        caught_by="submodules_keep_their_mode",
    ),
    Fault(
        name="evaluation computes gradients",
        target=f"{_HERE}:EvaluatesWithGradients",
        caught_by="evaluation_computes_no_gradients",
    ),
    Fault(
        name="inference tensors are left in the module",
        target=f"{_HERE}:LeavesInferenceTensors",
        caught_by="evaluation_computes_no_gradients",
        also=("evaluation_before_fit", "training_takes_the_training_branch_again"),
    ),
    Fault(
        name="predictions of all ranks on each",
        target=f"{_HERE}:GathersPredictions",
        caught_by="predictions_of_each_rank",
    ),
    Fault(
        name="a smaller last batch is filled up",
        target=f"{_HERE}:PadsBatches",
        caught_by="smaller_last_batch",
        also=(
            "last_batch_of_one_sample",
            "unequal_shares",
            "batch_size_changes",
            "other_batch_size_in_evaluation",
            "predictions_of_each_rank",
        ),
    ),
    Fault(
        name="a batch of one sample is skipped",
        target=f"{_HERE}:SkipsSingleSamples",
        caught_by="last_batch_of_one_sample",
    ),
    Fault(
        name="ranks weigh by their numbers of samples",
        target=f"{_HERE}:WeighsBySamples",
        caught_by="unequal_shares",
    ),
    Fault(
        name="larger batches are cut to the size of the first",
        target=f"{_HERE}:CutsBatches",
        caught_by="batch_size_changes",
    ),
    Fault(
        name="larger batches are cut in evaluation",
        target=f"{_HERE}:CutsBatchesInEvaluation",
        caught_by="other_batch_size_in_evaluation",
    ),
    Fault(
        name="every loader has to have a batch",
        target=f"{_HERE}:PeeksAtLoaders",
        caught_by="empty_validation",
    ),
    Fault(
        name="one epoch too many",
        target=f"{_HERE}:TrainsAnEpochMore",
        caught_by="epochs_end",
        also=("empty_validation", "limited_batches"),
    ),
    Fault(
        name="limits of batches are ignored",
        target=f"{_HERE}:IgnoresLimits",
        caught_by="limited_batches",
    ),
    Fault(
        name="each rank decides alone when to stop",
        target=f"{_HERE}:DecidesAlone",
        caught_by="one_rank_stops_all",
    ),
    Fault(
        name="all ranks together cannot stop",
        target=f"{_HERE}:DecidesByMinority",
        caught_by="early_stopping",
    ),
]
