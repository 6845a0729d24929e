"""Faults that the checks of the group `stages` catch."""

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

from faults import fault
from nnx_tiny.backend import TinyBackend

Weights = dict[str, Tensor]
Step = Callable[..., Any]


def weights_of(module: nn.Module) -> Weights:
    """Return a copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def set_weights(module: nn.Module, weights: Weights) -> None:
    """Overwrite the parameters."""
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])


class FreezesForEvaluation(TinyBackend):
    """Disables gradients for evaluation, and never enables them again."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            module.requires_grad_(False)


_first: WeakKeyDictionary[nn.Module, Weights] = WeakKeyDictionary()


class _Remembers(TinyBackend):
    """Keeps each module's first weights, like an engine that compiles or flattens them once."""

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
    """Evaluates, in a new engine, with the module's first weights."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and self.runs == 1:
            self.restore(module)


class EvaluatesItsFirstWeights(_Remembers):
    """Evaluates with the weights from the start of training, in the same engine."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and self.runs > 1:
            self.restore(module)


class TrainsFromTheStart(_Remembers):
    """Trains from the module's first weights, in a new engine."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and self.runs == 1:
            self.restore(module)


class TrainsFromItsFirstWeights(_Remembers):
    """Trains from the weights of the module's first training, in the same engine."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and self.runs > 1:
            self.restore(module)


class TrainsFromTheFirstEvaluation(TinyBackend):
    """Trains from the weights of the module's first evaluation."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            _first.setdefault(module, weights_of(module))
        elif module in _first:
            set_weights(module, _first[module])


FAULTS = [
    fault(
        "evaluation freezes the module for good",
        FreezesForEvaluation,
        "evaluation_before_fit",
        "evaluation_computes_no_gradients",
        "evaluation_uses_eval_mode",
        "training_mode_after_validation",
    ),
    fault(
        "a new engine evaluates the module's first weights",
        EvaluatesOldWeights,
        "evaluation_after_fit",
        "evaluation_batch_size_differs",
    ),
    fault(
        "the engine that trained evaluates the weights it started from",
        EvaluatesItsFirstWeights,
        "evaluation_with_the_same_trainer",
        "limit_batches",
    ),
    fault("a second fit starts from the initial weights", TrainsFromTheStart, "fit_again_with_new_trainer"),
    fault(
        "more steps of the same Trainer start from the initial weights",
        TrainsFromItsFirstWeights,
        "fit_again_with_same_trainer",
    ),
    fault(
        "a fit goes on from the weights of the first evaluation",
        TrainsFromTheFirstEvaluation,
        "stages_in_any_order",
    ),
]


class _Evaluates(TinyBackend):
    """Distinguishes evaluation steps from training steps."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.train(module, step, *args, **kwargs)
        return self.evaluate(module, step, *args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)


class StaleValidation(_Evaluates):
    """Evaluates with a copy of the weights made once."""

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
    """Continues training from the weights of the first validation."""

    before: Weights | None = None

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.before = self.before or weights_of(module)
        return step(*args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            set_weights(module, self.before)
        return step(*args, **kwargs)


class DropsGradientsInValidation(_Evaluates):
    """Drops accumulated gradients in evaluation."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters():
            parameter.grad = None
        return step(*args, **kwargs)


class EvaluatesTheTrainingBranch(_Evaluates):
    """Evaluates the code traced in training mode."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train()
        try:
            return step(*args, **kwargs)
        finally:
            module.eval()


class StaysInEvaluation(_Evaluates):
    """Stays in evaluation mode after the first evaluation."""

    has_evaluated = False

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.has_evaluated = True
        return step(*args, **kwargs)

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train(not self.has_evaluated)
        return step(*args, **kwargs)


class TrainsEveryModule(_Evaluates):
    """Puts all submodules into training mode before each step."""

    def train(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        module.train()
        return step(*args, **kwargs)


class EvaluatesWithGradients(_Evaluates):
    """Evaluates with gradients enabled."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return step(*args, **kwargs)


class LeavesInferenceTensors(_Evaluates):
    """Leaves buffers in the module that it made in inference mode."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        with torch.inference_mode():
            for part in module.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    part._buffers[name] = buffer.clone()
        return result


class GathersPredictions(_Evaluates):
    """Returns the predictions of all ranks on each."""

    def evaluate(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if step.__name__ != "predict_step" or self.context.world_size == 1:
            return result
        parts = [torch.empty_like(result) for _ in range(self.context.world_size)]
        dist.all_gather(parts, result)
        return torch.cat(parts)


FAULTS += [
    fault(
        "validation uses a copy of the weights made once",
        StaleValidation,
        "validation_sees_current_weights",
        "evaluation_uses_eval_mode",
        "smaller_last_batch",
        "limit_batches",
    ),
    fault(
        "stale weights after validate",
        StaleAfterValidation,
        "validation_keeps_training_unchanged",
        "validation_sees_current_weights",
        "validation_while_gradients_accumulate",
        "evaluation_uses_eval_mode",
        "training_mode_after_validation",
        "smaller_last_batch",
        "limit_batches",
    ),
    fault(
        "validation drops accumulated gradients",
        DropsGradientsInValidation,
        "validation_while_gradients_accumulate",
    ),
    fault("evaluation takes the training branch", EvaluatesTheTrainingBranch, "evaluation_uses_eval_mode"),
    fault(
        "training stays in evaluation mode after validation",
        StaysInEvaluation,
        "training_mode_after_validation",
        "evaluation_uses_eval_mode",
        "submodules_keep_their_mode",
    ),
    fault(
        "every step puts all submodules into training mode", TrainsEveryModule, "submodules_keep_their_mode"
    ),
    fault("evaluation computes gradients", EvaluatesWithGradients, "evaluation_computes_no_gradients"),
    fault(
        "inference tensors are left in the module", LeavesInferenceTensors, "evaluation_computes_no_gradients"
    ),
    fault("predictions of all ranks on each", GathersPredictions, "predictions_per_rank"),
]


class _Batches(TinyBackend):
    """Changes each batch, the first argument of steps."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        return step(self.changed(batch), *rest, **kwargs)

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class PadsBatches(_Batches):
    """Pads a smaller batch to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        self.size = self.size or len(batch[0])
        missing = max(0, self.size - len(batch[0]))
        return [torch.cat([part, part[:1].expand(missing, -1)]) for part in batch]


class CutsBatches(_Batches):
    """Truncates a larger training batch to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        if torch.is_grad_enabled():
            self.size = self.size or len(batch[0])
            return [part[: self.size] for part in batch]
        return batch


class CutsBatchesInEvaluation(_Batches):
    """Evaluates at most its initial number of samples."""

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        return batch if torch.is_grad_enabled() else [part[:6] for part in batch]


class SkipsSingleSamples(TinyBackend):
    """Skips training batches of one sample."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        return result * 0.0 if torch.is_grad_enabled() and len(args[0][0]) == 1 else result


class WeighsBySamples(TinyBackend):
    """Weights the ranks' gradients by their numbers of samples."""

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
    """Reads the first batch of every loader."""

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, torch.utils.data.DataLoader):
            _, *_ = dataloader
        return dataloader


FAULTS += [
    fault(
        "a smaller last batch is filled up",
        PadsBatches,
        "smaller_last_batch",
        "batch_size_differs_by_rank",
        "batch_size_changes",
        "predictions_per_rank",
    ),
    fault("a batch of one sample is skipped", SkipsSingleSamples, "last_batch_of_one_sample"),
    fault("ranks weigh by their numbers of samples", WeighsBySamples, "batch_size_differs_by_rank"),
    fault("larger batches are cut to the size of the first", CutsBatches, "batch_size_changes"),
    fault("larger batches are cut in evaluation", CutsBatchesInEvaluation, "evaluation_batch_size_differs"),
    fault("every loader has to have a batch", PeeksAtLoaders, "empty_validation"),
]


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
    """Reports one rank's wish only if exactly one rank has it."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = torch.tensor(int(decision))
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count == 1)


FAULTS += [
    fault(
        "one epoch too many", TrainsAnEpochMore, "max_epochs_ends_fit", "empty_validation", "limit_batches"
    ),
    fault("limits of batches are ignored", IgnoresLimits, "limit_batches"),
    fault("each rank decides alone when to stop", DecidesAlone, "one_rank_stops_all"),
    fault("all ranks together cannot stop", DecidesByMinority, "early_stopping"),
]
