"""What DeepSpeed cannot train is refused here, before an engine is made: it would fail later, or be wrong.

Reads the module, the optimizer and the config; changes nothing and never communicates, so that every rank
comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Adagrad, Optimizer, SparseAdam

from nnx.errors import UnsupportedError
from nnx_deepspeed._deepspeed_compat import is_tested_optimizer

__all__ = ["refuse_other_dtypes", "refuse_unfit"]

_NOT_BY_ELEMENT = (
    *(LBFGS.__name__, Adafactor.__name__, SparseAdam.__name__),
    *("Muon", "FusedLamb", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
)
_ON_THE_HOST = "DeepSpeedCPU"
"""What the names of DeepSpeed's optimizers begin with that step on the host only."""


def refuse_unfit(optimizer: Optimizer, *, config: Mapping[str, Any], device: torch.device) -> None:
    """Refuse an optimizer whose step would be wrong over flat partitions, or cannot be under this config.

    Args:
        optimizer: The user's.
        config: What ``deepspeed.initialize`` gets.
        device: Where the module is.

    Raises:
        UnsupportedError: With what can be used instead.
    """
    name, offloads = type(optimizer).__name__, _offloads(config)
    if name in _NOT_BY_ELEMENT:
        raise UnsupportedError(
            f"{name} cannot work on DeepSpeed's flat partitions: its update needs more than single elements.",
            remedy="Use one that works element by element (Adam, AdamW, SGD, ...), or strategy 'fsdp_auto'.",
        )
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
