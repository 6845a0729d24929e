"""Faults with kinds of layers and batches, with hooks and with chance."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

import torch
from torch import Tensor, nn

from faults import Fault
from faults.structure.averaging import Forgets
from nnx_tiny.backend import TinyBackend

Replaced = Mapping[nn.Parameter, nn.Parameter]
Step = Callable[..., Any]


class ForgetsContainers(Forgets):
    """Averages what belongs to layers, not what lies in lists and dicts of parameters."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        containers = (nn.ParameterList, nn.ParameterDict)
        layers = [part for part in module.modules() if not isinstance(part, containers)]
        return [p for layer in layers for p in layer.parameters(recurse=False)]


class ForgetsEmbeddings(Forgets):
    """Leaves embeddings to a path for sparse gradients that does not exist."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        layers = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
        return [p for layer in layers for p in layer.parameters(recurse=False)]


class ForgetsRecurrent(Forgets):
    """Averages layers whose parameters are called weight and bias, and knows some exceptions."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        layers = [part for part in module.modules() if not isinstance(part, nn.RNNBase)]
        return [p for layer in layers for p in layer.parameters(recurse=False)]


class AveragesWhatWasCalled(Forgets):
    """Averages the parameters of layers whose forward was called."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.called: set[nn.Module] = set()
        layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
        self.hooks = [layer.register_forward_hook(lambda one, *_: self.called.add(one)) for layer in layers]
        return super().parallelize(module, sample)

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        parts = [p for p in module.modules() if not isinstance(p, nn.Linear) or p in self.called]
        return [p for part in parts for p in part.parameters(recurse=False)]

    def unparallelize(self, module: nn.Module) -> Replaced:
        for hook in self.hooks:
            hook.remove()
        return {}


class ForgetsParametrizations(Forgets):
    """Averages what it finds under the names that layers usually have."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for name, p in module.named_parameters() if "parametrizations" not in name]


class RefusesGeneric(TinyBackend):
    """Puts a class of its own in front of the root's."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if Generic in type(module).__mro__:
            raise TypeError(f"__class__ assignment: object layout differs from {type(module).__name__}")
        return super().parallelize(module, sample)


class RunsBackwardInEvaluation(TinyBackend):
    """Evaluates whatever is computed during backward."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        modes = {part: part.training for part in module.modules()}
        module.eval()
        super().backward(module, loss, *args, **kwargs)
        for part, mode in modes.items():
            part.training = mode


class WantsLists(TinyBackend):
    """Looks into batches as if all were lists of tensors."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.samples = len(args[0][0])
        return step(*args, **kwargs)


class DropsHooks(TinyBackend):
    """Takes the hooks off the layers, to put its own there."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        for part in module.modules():
            if part is not module:
                part._forward_hooks.clear()
                part._forward_pre_hooks.clear()
        return super().parallelize(module, sample)


class DropsAlike(TinyBackend):
    """Seeds every step, and every rank, with one number."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(5)
        return step(*args, **kwargs)


class DropsAnew(TinyBackend):
    """Draws from the system, not from what the user seeded."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        return step(*args, **kwargs)


_HERE = "faults.structure.layers"

FAULTS = [
    Fault(
        name="lists of parameters are not averaged",
        target=f"{_HERE}:ForgetsContainers",
        caught_by="nested_containers",
    ),
    Fault(
        name="embeddings are not averaged",
        target=f"{_HERE}:ForgetsEmbeddings",
        caught_by="embeddings_and_convolutions",
    ),
    Fault(
        name="recurrent layers are not averaged",
        target=f"{_HERE}:ForgetsRecurrent",
        caught_by="recurrent_layers",
    ),
    Fault(
        name="layers that are not called are not averaged",
        target=f"{_HERE}:AveragesWhatWasCalled",
        caught_by="attention_layers",
    ),
    Fault(
        name="parametrized weights are not averaged",
        target=f"{_HERE}:ForgetsParametrizations",
        caught_by="parametrized_layers",
    ),
    Fault(
        name="generic classes are refused",
        target=f"{_HERE}:RefusesGeneric",
        caught_by="generic_root",
    ),
    Fault(
        name="recomputation runs in evaluation mode",
        target=f"{_HERE}:RunsBackwardInEvaluation",
        caught_by="recomputed_activations",
    ),
    Fault(
        name="batches have to be lists",
        target=f"{_HERE}:WantsLists",
        caught_by="structured_batches",
    ),
    Fault(
        name="the user's hooks are lost",
        target=f"{_HERE}:DropsHooks",
        caught_by="hooks_of_the_user",
    ),
    Fault(
        name="dropout is the same on all ranks and in all steps",
        target=f"{_HERE}:DropsAlike",
        caught_by="dropout_by_rank",
    ),
    Fault(
        name="dropout does not follow the seed",
        target=f"{_HERE}:DropsAnew",
        caught_by="dropout_is_reproducible",
        also=("recomputed_activations",),
    ),
]
