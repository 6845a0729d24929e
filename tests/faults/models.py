"""Faults with parameters, layers, hooks and random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from faults import EVERYTHING, fault, models_building
from nnx_tiny.backend import TinyBackend

__all__ = ["Forgets"]


class Forgets(TinyBackend):
    """Averages the gradients of known parameters, one by one."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """Return the parameters to average."""
        raise NotImplementedError

    @override
    def backward(self, module: nn.Module, loss: Tensor, *args: object, **kwargs: object) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for parameter in self.known(module):
            if self._averaging and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size


Replaced = Mapping[nn.Parameter, nn.Parameter]


class CutsUnevenShards(TinyBackend):
    """Returns only as many rows as all ranks hold equally."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if parameter.ndim:
                even = len(parameter) // self.context.world_size * self.context.world_size
                parameter.data[even:] = 0.0
        return {}


class LosesThinShards(TinyBackend):
    """Loses a matrix with fewer rows than ranks."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if parameter.ndim > 1 and len(parameter) < self.context.world_size:
                parameter.data.zero_()
        return {}


class ForgetsScalars(Forgets):
    """Averages only parameters with dimensions."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for p in module.parameters() if p.ndim]


class RefusesEmpty(TinyBackend):
    """Divides by the size of each parameter."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.scale = [1 / parameter.numel() for parameter in module.parameters()]
        return super().parallelize(module, sample)


class GivesMemoryBack(TinyBackend):
    """Restores elements in memory order instead of index order."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                in_memory = parameter.data.as_strided((parameter.numel(),), (1,))
                parameter.data = in_memory.reshape(parameter.shape).clone()
        return {}


class ForgetsTheSecondDtype(Forgets):
    """Averages only parameters of the first trained dtype."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        parameters = [p for p in module.parameters() if p.requires_grad]
        return [p for p in parameters if p.dtype == parameters[0].dtype]


class StoresFrozenInFull(TinyBackend):
    """Holds frozen parameters in float32."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.float()
        return super().parallelize(module, sample)


class ForgetsTheSecondBucket(Forgets):
    """Averages only the parameters of the first bucket."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for p in module.parameters() if p.numel() < 10_000]


def holders(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str, str]]]:
    """Return every module that holds each parameter, with the parameter's name there and its position."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for place, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            found.setdefault(parameter, []).append((part, name, place))
    return found


class BreaksTies(TinyBackend):
    """Trains a copy per module that shares a parameter, and shares the first one again afterwards."""

    broken: dict[str, list[tuple[nn.Module, str]]]

    def breaks(self, place: str) -> bool:
        return "blocks" not in place

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.tied = []
        for shared in holders(module).values():
            for part, name, place in shared[1:]:
                if self.breaks(place):
                    setattr(part, name, nn.Parameter(getattr(part, name).detach().clone()))
                    self.tied.append((shared[0], (part, name)))
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        for (first, first_name, _), (part, name) in self.tied:
            setattr(part, name, getattr(first, first_name))
        return {}


class BreaksTiesOfLayers(BreaksTies):
    """Breaks ties between repeated layers only."""

    def breaks(self, place: str) -> bool:
        return "blocks" in place


class UntiesInTheEnd(TinyBackend):
    """Gives every module its own parameter after training."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for shared in holders(module).values():
            for part, name, _ in shared[1:]:
                setattr(part, name, nn.Parameter(getattr(part, name).detach().clone()))
        return {}


class DecaysFrozen(TinyBackend):
    """Decays every parameter of the optimizer, even frozen ones."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = step(*args, **kwargs)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    parameter.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
        return result


class Unfreezes(TinyBackend):
    """Returns all parameters as trainable."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.requires_grad_(True)
        return {}


class ForgetsBesideFrozen(Forgets):
    """Averages nothing in a partly frozen layer."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        frozen = [p for p in module.parameters() if not p.requires_grad]
        return [] if frozen else list(module.parameters())


class WaitsForAllGradients(TinyBackend):
    """Cannot step until every parameter has a gradient."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        missing = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient of {missing}")


class KeepsOldGradients(TinyBackend):
    """Replaces a missing gradient by that of an earlier step."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self.kept = getattr(self, "kept", {})
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = self.kept.get(parameter)
            else:
                self.kept[parameter] = parameter.grad.clone()


class RunsLayersOnce(TinyBackend):
    """Returns the first output again for the second call of a layer in a step, without gradients."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.outputs: dict[nn.Module, Tensor] = {}
        layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
        self.hooks = [layer.register_forward_hook(self._first) for layer in layers]
        return super().parallelize(module, sample)

    def _first(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        if layer in self.outputs and torch.is_grad_enabled():
            return self.outputs[layer].detach()
        self.outputs[layer] = output
        return output

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.outputs.clear()
        return step(*args, **kwargs)

    def unparallelize(self, module: nn.Module) -> Replaced:
        for hook in self.hooks:
            hook.remove()
        return {}


FAULTS = [
    fault("an uneven shard is cut", CutsUnevenShards, "uneven_dimensions", *EVERYTHING),
    fault(
        "a matrix with fewer rows than ranks is lost",
        LosesThinShards,
        "uneven_dimensions",
        "embeddings_and_convolutions",
        "recurrent_layers",
        "attention_layers",
    ),
    fault("gradients of scalars are not averaged", ForgetsScalars, "scalar_parameters"),
    fault("parameters without elements are divided by", RefusesEmpty, "empty_parameters"),
    fault("memory is given back in its own order", GivesMemoryBack, "non_contiguous_parameters"),
    fault("a second dtype is not averaged", ForgetsTheSecondDtype, "mixed_dtypes"),
    fault("frozen parameters become float32", StoresFrozenInFull, "quantized_parameters"),
    fault("the second bucket is forgotten", ForgetsTheSecondBucket, "large_layers"),
    fault("tied parameters are trained apart", BreaksTies, "tied_parameters"),
    fault("tied repeated layers are trained apart", BreaksTiesOfLayers, "tied_repeated_layers"),
    fault("ties are broken in the end", UntiesInTheEnd, "ties_survive_training"),
    fault("frozen parameters decay", DecaysFrozen, "frozen_parameters", "partly_frozen_layers"),
    fault("frozen parameters come back unfrozen", Unfreezes, "frozen_parameters"),
    fault("nothing beside a frozen parameter is averaged", ForgetsBesideFrozen, "partly_frozen_layers"),
    fault(
        "every parameter has to have a gradient",
        WaitsForAllGradients,
        "unused_parameters",
        "parameters_used_sometimes",
    ),
    fault("a missing gradient is taken from an earlier step", KeepsOldGradients, "parameters_used_sometimes"),
    fault(
        "a layer runs once in a step",
        RunsLayersOnce,
        "layers_called_twice",
        "tied_parameters",
        "activation_checkpointing",
    ),
]


Replaced = Mapping[nn.Parameter, nn.Parameter]
Step = Callable[..., Any]


class ForgetsContainers(Forgets):
    """Averages parameters of layers, but not those in lists and dicts of parameters."""

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
    """Averages only layers with parameters called weight and bias, and some exceptions."""

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
    """Averages only parameters with common names."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for name, p in module.named_parameters() if "parametrizations" not in name]


class RefusesGeneric(TinyBackend):
    """Adds a base class of its own to the root's class."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if Generic in type(module).__mro__:
            raise TypeError(f"__class__ assignment: object layout differs from {type(module).__name__}")
        return super().parallelize(module, sample)


class RunsBackwardInEvaluation(TinyBackend):
    """Runs forwards during backward in evaluation mode."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        modes = {part: part.training for part in module.modules()}
        module.eval()
        super().backward(module, loss, *args, **kwargs)
        for part, mode in modes.items():
            part.training = mode


class WantsLists(TinyBackend):
    """Treats all batches as lists of tensors."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self.samples = len(args[0][0])
        return step(*args, **kwargs)


class DropsHooks(TinyBackend):
    """Removes the user's hooks to set its own."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        for part in module.modules():
            if part is not module:
                part._forward_hooks.clear()
                part._forward_pre_hooks.clear()
        return super().parallelize(module, sample)


class DropsAlike(TinyBackend):
    """Seeds every step and every rank alike."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(5)
        return step(*args, **kwargs)


class DropsAnew(TinyBackend):
    """Draws from the system instead of the user's seed."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        return step(*args, **kwargs)


FAULTS += [
    fault("lists of parameters are not averaged", ForgetsContainers, "nested_containers"),
    fault("embeddings are not averaged", ForgetsEmbeddings, "embeddings_and_convolutions"),
    fault("recurrent layers are not averaged", ForgetsRecurrent, "recurrent_layers"),
    fault("layers that are not called are not averaged", AveragesWhatWasCalled, "attention_layers"),
    fault("parametrized weights are not averaged", ForgetsParametrizations, "parametrized_layers"),
    fault("generic classes are refused", RefusesGeneric, "generic_lightning_module"),
    fault("recomputation runs in evaluation mode", RunsBackwardInEvaluation, "activation_checkpointing"),
    fault("batches have to be lists", WantsLists, "nested_batches"),
    fault("the user's hooks are lost", DropsHooks, "user_hooks"),
    fault("dropout is the same on all ranks and in all steps", DropsAlike, "dropout_differs_by_rank"),
    fault(
        "dropout does not follow the seed", DropsAnew, "dropout_is_reproducible", "activation_checkpointing"
    ),
]

FAULTS += models_building.FAULTS
