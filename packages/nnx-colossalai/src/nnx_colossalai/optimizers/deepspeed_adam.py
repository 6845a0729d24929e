"""DeepSpeed's CPU Adam as the kernel under the user's own Adam or AdamW, where it is asked for.

Its numbers differ from torch's in the last bits, and it compiles for minutes when it is first used, so
nothing here is the default. The optimizer's state keeps torch's form: checkpoints do not depend on it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from nnx.errors import OptionError
from nnx_colossalai.optimizers.kernels import in_host_memory

__all__ = ["DeepSpeedAdam"]


class DeepSpeedAdam:
    """Steps what DeepSpeed's kernel can step of a shadow optimizer.

    Raises:
        OptionError: DeepSpeed is not installed.
    """

    def __init__(self) -> None:
        try:
            self._class: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        except ImportError as error:
            raise OptionError(
                f"cpu_adam='deepspeed' needs DeepSpeed, which cannot be imported: {error}.",
                remedy="Run `pip install nnx-colossalai[deepspeed]`, or leave cpu_adam out: torch's fused "
                "kernel is nearly as fast.",
            ) from error
        self._engines: dict[bool, Any] = {}

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether it is an Adam whose gradients are complete, not still scaled by a loss scaler."""
        return isinstance(optimizer, Adam) and getattr(optimizer, "found_inf", None) is None

    def step(self, shadow: Optimizer) -> None:
        """Step what it can, and leave the shadow the parameters that remain."""
        remaining = []
        for group in shadow.param_groups:
            mine = [] if group["amsgrad"] or group["maximize"] else list(filter(_fits, group["params"]))
            if mine:
                self._step_group(shadow, group, mine)
            taken = set(mine)
            rest = [parameter for parameter in group["params"] if parameter not in taken]
            if rest:
                remaining.append({**group, "params": rest})
        shadow.param_groups = remaining

    def _step_group(self, shadow: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
        engine = self._engine(bool(group["decoupled_weight_decay"]), parameters[0])
        settings = {name: _number(group[name]) for name in ("lr", "eps", "weight_decay")}
        betas = tuple(_number(beta) for beta in group["betas"])
        engine.param_groups = [{"params": parameters, "betas": betas, "bias_correction": True, **settings}]
        for parameter in parameters:
            state = shadow.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            engine.state[parameter] = {**state, "step": int(state["step"])}
        engine.step()
        for parameter in parameters:
            shadow.state[parameter]["step"] += 1
        engine.state.clear()
        engine.param_groups = []

    def _engine(self, decoupled: bool, like: Tensor) -> Any:
        if decoupled not in self._engines:
            self._engines[decoupled] = self._class([torch.zeros_like(like)], adamw_mode=decoupled)
        return self._engines[decoupled]


def _fits(parameter: Tensor) -> bool:
    """The kernel walks over float32 memory, so parameter and gradient must lie alike and without gaps."""
    grad = parameter.grad
    alike = grad is not None and grad.layout == torch.strided and grad.stride() == parameter.stride()
    return (
        alike and in_host_memory(parameter) and parameter.dtype == torch.float32 and parameter.is_contiguous()
    )


def _number(value: Any) -> float:
    return float(value)
