"""Faults with models and optimizers that are built at unusual times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import enable_wrap

from faults import Fault
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend

Replaced = Mapping[nn.Parameter, nn.Parameter]


class TrustsSeeds(TinyBackend):
    """Takes it that all ranks have built the same model."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        return {}


class BuildsOnMeta(TinyBackend):
    """Lets `configure_model` build on the meta device, and never gives what is there its values."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")


class BuildsTwice(TinyBackend):
    """Calls `configure_model` itself, too."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if isinstance(module, LightningModule):
            module.configure_model()
        return super().parallelize(module, sample)


class RefusesTheOlderHook(DDPStrategy):
    """Shards only what is built in the newer hook."""

    building = False

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        self.building = True
        with super().tensor_init_context(empty_init):
            yield
        self.building = False

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        if not self.building:
            raise NotImplementedError("build the model in `configure_model`")
        yield


class AlwaysInitializesEmpty(DDPStrategy):
    """Builds under `init_module` on the meta device, asked for or not."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init) if empty_init is None else torch.device("meta"):
            yield


class ForgetsEarlyOptimizers(TinyBackend):
    """Puts new parameters into the module, and does not say which took whose place."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        super().parallelize(module, sample)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, old in list(part.named_parameters(recurse=False)):
                new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
                setattr(part, name, made.setdefault(old, new))
        return {}


class _Holder(nn.Module):
    """A wrapper with the wrapped module in it, which changes every name below."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class WrapsVisibly(TinyBackend):
    """Puts a module of its own around what is wrapped."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return enable_wrap(wrapper_cls=_Holder)


class NeverWraps(FSDPBackend):
    """Shards the root alone, whatever is wrapped."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class KeepsWhatWasThere(FSDPBackend):
    """Allocates what is on the meta device, and does not call `reset_parameters`."""

    def parallelize(self, module: nn.Module, sample: Any) -> Replaced:
        if any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=self.context.device)
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.detach().zero_()
        return super().parallelize(module, sample)


class KeepsLateOnes(KeepsWhatWasThere):
    """Does so only where the model was built late."""

    def parallelize(self, module: nn.Module, sample: Any) -> Replaced:
        if getattr(type(module), "configure_model", None) is LightningModule.configure_model:
            return FSDPBackend.parallelize(self, module, sample)
        return super().parallelize(module, sample)


_HERE = "faults.structure.building"
_DECLARED = ("faults.structure.declared",)

FAULTS = [
    Fault(
        name="each rank starts from its own weights",
        target=f"{_HERE}:TrustsSeeds",
        caught_by="built_without_a_seed",
    ),
    Fault(
        name="configure_model builds on meta for good",
        target=f"{_HERE}:BuildsOnMeta",
        caught_by="built_in_configure_model",
        also=("configure_model_is_called_once", "built_in_configure_sharded_model", "wrapped_layers"),
    ),
    Fault(
        name="configure_model is called twice",
        target=f"{_HERE}:BuildsTwice",
        caught_by="configure_model_is_called_once",
    ),
    Fault(
        name="configure_sharded_model is refused",
        target=f"{_HERE}:RefusesTheOlderHook",
        caught_by="built_in_configure_sharded_model",
        also=("unused_parameters", "parameters_used_now_and_then"),
    ),
    Fault(
        name="init_module always builds on meta",
        target=f"{_HERE}:AlwaysInitializesEmpty",
        caught_by="built_in_init_module",
        also=("unused_parameters", "parameters_used_now_and_then"),
    ),
    Fault(
        name="what is built on meta never gets its own values",
        target="keeps_what_was_there",
        imports=_DECLARED,
        caught_by="built_without_values",
        also=("built_on_meta_in_configure_model",),
    ),
    Fault(
        name="only what configure_model builds on meta gets no values",
        target="keeps_what_was_there_late",
        imports=_DECLARED,
        caught_by="built_on_meta_in_configure_model",
    ),
    Fault(
        name="an optimizer made early steps parameters that are gone",
        target=f"{_HERE}:ForgetsEarlyOptimizers",
        caught_by="optimizer_made_early",
    ),
    Fault(
        name="wrap changes names",
        target=f"{_HERE}:WrapsVisibly",
        caught_by="wrapped_layers",
    ),
    Fault(
        name="wrap does nothing although it is declared",
        target="never_wraps",
        imports=_DECLARED,
        caught_by="wrapped_layers_are_sharded",
    ),
]
