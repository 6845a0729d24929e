"""Faults in evaluation, and in what it does to training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from faults import Fault
from faults.stages.weights import Step, Weights, set_weights, weights_of
from nnx_tiny.backend import TinyBackend


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
    """Puts buffers that it made in inference mode into the module."""

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


_HERE = "faults.stages.evaluation"

FAULTS = [
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
    ),
    Fault(
        name="predictions of all ranks on each",
        target=f"{_HERE}:GathersPredictions",
        caught_by="predictions_of_each_rank",
    ),
]
