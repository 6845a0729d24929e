"""Faults with buffers, and with models and optimizers built at unusual times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer

from faults import DECLARED, fault
from nnx import Capabilities
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend

Replaced = Mapping[nn.Parameter, nn.Parameter]


class LosesBuffers(TinyBackend):
    """Restores the initial values of non-persistent buffers."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        saved = module.state_dict()
        for name, buffer in module.named_buffers():
            if name not in saved:
                buffer.copy_(self.before[name])
        return {}


class KeepsBuffersPerRank(TinyBackend):
    """Evaluates with each rank's own buffers."""

    def sync_buffers(self, module: nn.Module) -> None:
        pass


class KeepsBuffersPerRankAfterFit(TinyBackend):
    """Synchronizes buffers only during training."""

    is_training = False

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.is_training = bool(optimizers)

    def sync_buffers(self, module: nn.Module) -> None:
        if self.is_training:
            super().sync_buffers(module)


class NormalizesOverTheBatch(TinyBackend):
    """Evaluates with the statistics of the current batch."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
        modes = [norm.training for norm in norms]
        for norm in norms:
            norm.train()
        result = step(*args, **kwargs)
        for norm, mode in zip(norms, modes, strict=True):
            norm.train(mode)
        return result


class LosesStatistics(TinyBackend):
    """Resets running statistics after each evaluation."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if not torch.is_grad_enabled():
            for part in module.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.reset_running_stats()
        return result


class ForgetsLayerSync(DDPStrategy):
    """Ignores `sync_batchnorm`."""

    def setup(self, trainer: Trainer) -> None:
        self._layer_sync = None
        super().setup(trainer)


FAULTS = [
    fault(
        "buffers that are not saved are lost",
        LosesBuffers,
        "buffers_keep_updates",
        "buffers_in_test_after_fit",
    ),
    fault(
        "each rank evaluates with its own buffers", KeepsBuffersPerRank, "buffers_in_validation", "batch_norm"
    ),
    fault(
        "after fit each rank tests with its own buffers",
        KeepsBuffersPerRankAfterFit,
        "buffers_in_test_after_fit",
    ),
    fault("evaluation normalises over the batch", NormalizesOverTheBatch, "batch_norm"),
    fault("running statistics are lost in evaluation", LosesStatistics, "batch_norm"),
    fault(
        "sync_batchnorm is ignored",
        ForgetsLayerSync,
        "synchronized_batch_norm",
        "unused_parameters",
        "parameters_used_sometimes",
    ),
]


Replaced = Mapping[nn.Parameter, nn.Parameter]


class TrustsSeeds(TinyBackend):
    """Assumes that all ranks built the same model."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        return {}


class BuildsOnMeta(TinyBackend):
    """Lets `configure_model` build on the meta device, and never sets the values."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")


class BuildsTwice(TinyBackend):
    """Calls `configure_model` itself, too."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if isinstance(module, LightningModule):
            module.configure_model()
        return super().parallelize(module, sample)


class RefusesTheOlderHook(DDPStrategy):
    """Shards only layers built in the newer hook."""

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
    """Always builds under `init_module` on the meta device."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init) if empty_init is None else torch.device("meta"):
            yield


class ForgetsEarlyOptimizers(TinyBackend):
    """Replaces parameters without telling the optimizer."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        super().parallelize(module, sample)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, old in list(part.named_parameters(recurse=False)):
                new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
                setattr(part, name, made.setdefault(old, new))
        return {}


class _Holder(nn.Module):
    """A wrapper around a module, which changes every name below."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class WrapsVisibly(TinyBackend):
    """Adds a module of its own around wrapped layers."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return enable_wrap(wrapper_cls=_Holder)


class NeverWraps(FSDPBackend):
    """Shards only the root and ignores `wrap()`."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class KeepsWhatWasThere(FSDPBackend):
    """Allocates meta tensors without a call of `reset_parameters`."""

    def parallelize(self, module: nn.Module, sample: Any) -> Replaced:
        if any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=self.context.device)
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.detach().zero_()
        return super().parallelize(module, sample)


class KeepsLateOnes(KeepsWhatWasThere):
    """Allocates without `reset_parameters` only for models built in `configure_model`."""

    def parallelize(self, module: nn.Module, sample: Any) -> Replaced:
        if getattr(type(module), "configure_model", None) is LightningModule.configure_model:
            return FSDPBackend.parallelize(self, module, sample)
        return super().parallelize(module, sample)


DECLARED |= {
    KeepsWhatWasThere: Capabilities(meta_initialization=True),
    KeepsLateOnes: Capabilities(meta_initialization=True),
    NeverWraps: Capabilities(manual_wrap=True),
}

FAULTS += [
    fault("each rank starts from its own weights", TrustsSeeds, "unseeded_ranks_start_equal"),
    fault(
        "configure_model builds on meta for good",
        BuildsOnMeta,
        "built_in_configure_model",
        "configure_model_is_called_once",
        "built_in_configure_sharded_model",
        "wrap_in_configure_model",
    ),
    fault("configure_model is called twice", BuildsTwice, "configure_model_is_called_once"),
    fault(
        "configure_sharded_model is refused",
        RefusesTheOlderHook,
        "built_in_configure_sharded_model",
        "unused_parameters",
        "parameters_used_sometimes",
    ),
    fault(
        "init_module always builds on meta",
        AlwaysInitializesEmpty,
        "built_in_init_module",
        "unused_parameters",
        "parameters_used_sometimes",
    ),
    fault(
        "what is built on meta never gets its own values",
        KeepsWhatWasThere,
        "empty_init",
        "built_on_meta_in_configure_model",
    ),
    fault(
        "only what configure_model builds on meta gets no values",
        KeepsLateOnes,
        "built_on_meta_in_configure_model",
    ),
    fault(
        "an optimizer made early steps parameters that are gone",
        ForgetsEarlyOptimizers,
        "optimizer_created_in_init",
    ),
    fault("wrap changes names", WrapsVisibly, "wrap_in_configure_model"),
    fault("wrap does nothing although it is declared", NeverWraps, "wrap_shards_layers"),
]
