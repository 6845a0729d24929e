"""What DeepSpeed cannot train is refused here, before an engine is made: it would fail later, or be wrong.

Reads the module, the optimizer and the config; changes nothing and never communicates, so that every rank
comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer, SparseAdam

from nnx_core.elementwise import Trial, try_optimizer
from nnx_core.errors import UnsupportedError
from nnx_deepspeed._deepspeed_compat import is_tested_optimizer

_ON_THE_HOST = "DeepSpeedCPU"
"""What the names of DeepSpeed's optimizers begin with that step on the host only."""


def refuse_unfit(optimizer: Optimizer, *, config: Mapping[str, Any], device: torch.device) -> None:
    """Refuse an optimizer whose step would be wrong over flat partitions, or cannot be under this config.

    Args:
        optimizer: The user's.
        config: What ``deepspeed.initialize`` gets.
        device: The device of the module.

    Raises:
        UnsupportedError: With what can be used instead.
    """
    name, offloads = type(optimizer).__name__, _offloads(config)
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedError(
            f"{name} cannot work on DeepSpeed's flat partitions: it takes sparse gradients alone.",
            remedy="Use Adam or AdamW and layers with sparse=False, or strategy 'nnscaler_zero'.",
        )
    if not name.startswith(_ON_THE_HOST):  # DeepSpeed's own, whose operators take no tensors of a trial
        _refuse_dependence(name, try_optimizer(optimizer))
    if isinstance(optimizer, Adagrad) and len(optimizer.param_groups) > 1:
        raise UnsupportedError(
            f"DeepSpeed rebuilds Adagrad with one param group; this one has {len(optimizer.param_groups)}.",
            remedy="Use one group, or another optimizer.",
        )
    if name.startswith(_ON_THE_HOST) and device.type != "cpu" and not offloads:
        raise UnsupportedError(
            f"{name} steps on the host, and the optimizer state of this run is on {device}.",
            remedy="Use offload_optimizer=True or 'nnx_deepspeed_3_cpu', or an optimizer of torch.optim.",
        )
    if config.get("zero_force_ds_cpu_optimizer") and offloads and not name.startswith(_ON_THE_HOST):
        raise UnsupportedError(
            f"the config forces DeepSpeed's own optimizers where they are offloaded; this one is {name}.",
            remedy="Use deepspeed.ops.adam.DeepSpeedCPUAdam, or zero_force_ds_cpu_optimizer=False.",
        )
    if not config.get("zero_allow_untested_optimizer", True) and not is_tested_optimizer(optimizer):
        raise UnsupportedError(
            f"DeepSpeed has not tested {name} with ZeRO, and zero_allow_untested_optimizer is False.",
            remedy="Use Adam, AdamW or Adagrad, or zero_allow_untested_optimizer=True.",
        )


def _refuse_dependence(name: str, trial: Trial) -> None:
    """Refuse what is not right on flat partitions, each of them stepped alone."""
    if trial.dependence == "element" and trial.evaluations <= 1:
        return
    if trial.error is not None:
        found = f"what its update depends on could not be found out: {trial.error}"
    elif trial.evaluations > 1:
        found = f"its step evaluates its closure {trial.evaluations} times, DeepSpeed's step does so once"
    else:
        found = f"the update of an element depends on its whole {trial.dependence}, not on the element alone"
    raise UnsupportedError(
        f"{name} cannot work on DeepSpeed's flat partitions: {found}.",
        remedy="Use one that works element by element (Adam, AdamW, SGD, ...), or strategy 'fsdp_auto'.",
    )


def _offloads(config: Mapping[str, Any]) -> bool:
    section = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(section.get("device", "none") != "none")


def refuse_other_dtypes(module: nn.Module) -> None:
    """Refuse trained parameters that are not float32, in which DeepSpeed keeps its masters.

    Raises:
        UnsupportedError: With the first of them.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"DeepSpeed trains float32 parameters; {name} is {dtype}.",
                remedy="Convert it, and let precision='bf16-mixed' choose smaller types, or use 'fsdp_auto'.",
            )


def refuse_sparse(module: nn.Module) -> None:
    """Refuse layers with sparse gradients, which flat partitions cannot hold.

    Raises:
        UnsupportedError: With the first of them.
    """
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True and isinstance(
            submodule, (nn.Embedding, nn.EmbeddingBag)
        ):
            raise UnsupportedError(
                f"DeepSpeed's flat partitions hold no sparse gradients; {name or 'the model'} is a "
                f"{type(submodule).__name__} with sparse=True.",
                remedy="Use sparse=False, or a strategy that keeps them, such as 'nnscaler_zero'.",
            )


class FixedModel:
    """What must stay as it was when DeepSpeed laid a model out: its parameters, and which of them train.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (name, sub, dict(sub._parameters), _identities(sub._parameters))
            for name, sub in module.named_modules()
        ]
        self._trains = [(name, p, p.requires_grad) for name, p in module.named_parameters()]

    def refuse_changes(self) -> None:
        """Refuse to go on if something has changed since.

        Raises:
            UnsupportedError: With the first change.
        """
        for name, submodule, parameters, identities in self._held:
            if _identities(submodule._parameters) != identities:
                raise UnsupportedError(
                    f"the parameters of {name or 'the model'} were exchanged since training began: "
                    f"{', '.join(parameters) or 'none'} before, {', '.join(submodule._parameters) or 'none'} "
                    "now; DeepSpeed's partitions are fixed.",
                    remedy="Prune or parametrize before training, or use strategy 'fairscale_oss' or 'ddp'.",
                )
        for name, parameter, trains in self._trains:
            if parameter.requires_grad != trains:
                raise UnsupportedError(
                    f"{name} was {'unfrozen' if parameter.requires_grad else 'frozen'} while training; "
                    "DeepSpeed's partitions are fixed.",
                    remedy="Freeze in `configure_model` or `__init__`, or use strategy 'fsdp_auto'.",
                )


def _identities(parameters: Mapping[str, nn.Parameter | None]) -> list[tuple[str, int]]:
    """Which objects have which names; tensors themselves would compare their values."""
    return [(name, id(parameter)) for name, parameter in parameters.items()]
