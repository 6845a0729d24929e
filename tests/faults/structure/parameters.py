"""Faults with parameters of unusual shapes, and with those that are tied, frozen or not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import EVERYTHING, Fault
from faults.structure.averaging import Forgets
from nnx_tiny.backend import TinyBackend

Replaced = Mapping[nn.Parameter, nn.Parameter]

# --- shapes -------------------------------------------------------------------------------------------


class CutsUnevenShards(TinyBackend):
    """Gives back as many rows as every rank holds alike."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if parameter.ndim:
                even = len(parameter) // self.context.world_size * self.context.world_size
                parameter.data[even:] = 0.0
        return {}


class LosesThinShards(TinyBackend):
    """Gives back nothing of a matrix with fewer rows than ranks."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if parameter.ndim > 1 and len(parameter) < self.context.world_size:
                parameter.data.zero_()
        return {}


class ForgetsScalars(Forgets):
    """Averages what has dimensions."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for p in module.parameters() if p.ndim]


class RefusesEmpty(TinyBackend):
    """Divides by the size of each parameter."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.scale = [1 / parameter.numel() for parameter in module.parameters()]
        return super().parallelize(module, sample)


class GivesMemoryBack(TinyBackend):
    """Takes the order of a parameter's elements in memory for that of its indices."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                in_memory = parameter.data.as_strided((parameter.numel(),), (1,))
                parameter.data = in_memory.reshape(parameter.shape).clone()
        return {}


class ForgetsTheSecondDtype(Forgets):
    """Averages parameters of the dtype of the first one that is trained."""

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
    """Averages what fits the first bucket."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for p in module.parameters() if p.numel() < 10_000]


# --- ties ---------------------------------------------------------------------------------------------


def holders(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str, str]]]:
    """Every module that holds each parameter, with its own name for it and its place."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for place, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            found.setdefault(parameter, []).append((part, name, place))
    return found


class BreaksTies(TinyBackend):
    """Trains a copy for each module that shares a parameter, and shares the first one again afterwards."""

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
    """Does so with repeated layers only."""

    def breaks(self, place: str) -> bool:
        return "blocks" in place


class UntiesInTheEnd(TinyBackend):
    """Gives every module a parameter of its own back."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        for shared in holders(module).values():
            for part, name, _ in shared[1:]:
                setattr(part, name, nn.Parameter(getattr(part, name).detach().clone()))
        return {}


# --- frozen and unused --------------------------------------------------------------------------------


class DecaysFrozen(TinyBackend):
    """Decays every parameter of the optimizer, trained or not."""

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
    """Gives all parameters back as ones to be trained."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.requires_grad_(True)
        return {}


class ForgetsBesideFrozen(Forgets):
    """Averages nothing in a layer of which a part is frozen."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        frozen = [p for p in module.parameters() if not p.requires_grad]
        return [] if frozen else list(module.parameters())


class WaitsForAllGradients(TinyBackend):
    """Cannot step before every parameter has its gradient."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        missing = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient of {missing}")


class KeepsOldGradients(TinyBackend):
    """Gives a parameter without a gradient that of an earlier step."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self.kept = getattr(self, "kept", {})
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = self.kept.get(parameter)
            else:
                self.kept[parameter] = parameter.grad.clone()


class RunsLayersOnce(TinyBackend):
    """The second call of a layer in one step gives what the first one gave, without gradients."""

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


_HERE = "faults.structure.parameters"

FAULTS = [
    Fault(
        name="an uneven shard is cut",
        target=f"{_HERE}:CutsUnevenShards",
        caught_by="uneven_dimensions",
        also=EVERYTHING,
    ),
    Fault(
        name="a matrix with fewer rows than ranks is lost",
        target=f"{_HERE}:LosesThinShards",
        caught_by="uneven_dimensions",
        also=("embeddings_and_convolutions", "recurrent_layers", "attention_layers"),
    ),
    Fault(
        name="gradients of scalars are not averaged",
        target=f"{_HERE}:ForgetsScalars",
        caught_by="scalar_parameters",
    ),
    Fault(
        name="parameters without elements are divided by",
        target=f"{_HERE}:RefusesEmpty",
        caught_by="empty_parameters",
    ),
    Fault(
        name="memory is given back in its own order",
        target=f"{_HERE}:GivesMemoryBack",
        caught_by="strided_parameters",
    ),
    Fault(
        name="a second dtype is not averaged",
        target=f"{_HERE}:ForgetsTheSecondDtype",
        caught_by="mixed_dtypes",
    ),
    Fault(
        name="frozen parameters become float32",
        target=f"{_HERE}:StoresFrozenInFull",
        caught_by="quantized_parameters",
    ),
    Fault(
        name="the second bucket is forgotten",
        target=f"{_HERE}:ForgetsTheSecondBucket",
        caught_by="large_layers",
    ),
    Fault(
        name="tied parameters are trained apart",
        target=f"{_HERE}:BreaksTies",
        caught_by="tied_parameters",
    ),
    Fault(
        name="tied repeated layers are trained apart",
        target=f"{_HERE}:BreaksTiesOfLayers",
        caught_by="tied_repeated_layers",
    ),
    Fault(
        name="ties are broken in the end",
        target=f"{_HERE}:UntiesInTheEnd",
        caught_by="ties_last",
    ),
    Fault(
        name="frozen parameters decay",
        target=f"{_HERE}:DecaysFrozen",
        caught_by="frozen_parameters",
        also=("partly_frozen_layers",),
    ),
    Fault(
        name="frozen parameters come back unfrozen",
        target=f"{_HERE}:Unfreezes",
        caught_by="frozen_parameters",
    ),
    Fault(
        name="nothing beside a frozen parameter is averaged",
        target=f"{_HERE}:ForgetsBesideFrozen",
        caught_by="partly_frozen_layers",
    ),
    Fault(
        name="every parameter has to have a gradient",
        target=f"{_HERE}:WaitsForAllGradients",
        caught_by="unused_parameters",
        also=("parameters_used_now_and_then",),
    ),
    Fault(
        name="a missing gradient is taken from an earlier step",
        target=f"{_HERE}:KeepsOldGradients",
        caught_by="parameters_used_now_and_then",
    ),
    Fault(
        name="a layer runs once in a step",
        target=f"{_HERE}:RunsLayersOnce",
        caught_by="layers_used_twice",
        also=("tied_parameters", "recomputed_activations"),
    ),
]
