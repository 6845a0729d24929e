"""Adam optimizers with the names and arguments of ``colossalai.nn.optimizer``, built on torch's Adam.

Masters in host memory are stepped with torch's fused CPU kernel, masters on the device with its kernel.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from nnx_core.errors import OptionError

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class HybridAdam(torch.optim.Adam):
    """Adam for parameters on any device: bitwise torch's AdamW with ``adamw_mode``, else bitwise its Adam.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: Only True is supported.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Decay decoupled from the gradient with `adamw_mode`, else an L2 penalty.
        adamw_mode: True for AdamW, False for Adam.
        nvme_offload_fraction: Only 0 is supported.
        nvme_offload_dir: Only None is supported.

    Raises:
        OptionError: An argument has an unsupported value.
    """

    def __init__(  # noqa: PLR0917 # the historical order
        self,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        name = type(self).__name__
        _check_bias_correction(name, bias_correction)
        if nvme_offload_fraction or nvme_offload_dir is not None:
            raise OptionError(
                f"{name}(nvme_offload_fraction={nvme_offload_fraction!r}, nvme_offload_dir="
                f"{nvme_offload_dir!r}): moments are on the device or in host memory, not on disk.",
                remedy="Leave both out; placement_policy and offload_fraction of the strategy offload.",
            )
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
        )


class CPUAdam(HybridAdam):
    """Alias of `HybridAdam`; the plan, not this class, decides which masters are in host memory."""


class FusedAdam(torch.optim.Adam):
    """Adam or AdamW with the argument order of ColossalAI's FusedAdam.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: Only True is supported.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        adamw_mode: True for AdamW, False for Adam.
        weight_decay: Decay decoupled from the gradient with `adamw_mode`, else an L2 penalty.
        amsgrad: True to use the largest second moment so far.
        set_grad_none: True if ``zero_grad()`` sets gradients to None; False if it fills them with zeros.
    """

    def __init__(  # noqa: PLR0917 # the historical order
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check_bias_correction(type(self).__name__, bias_correction)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state for copies and pickles, and `set_grad_none`."""
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients as torch does; `set_grad_none` is the default."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


def _check_bias_correction(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        raise OptionError(
            f"{name}(bias_correction=False): torch's Adam always corrects the bias of its moments.",
            remedy="Remove the argument; a learning rate warm-up damps the first steps.",
        )


_EACH_BY_ITSELF: tuple[type[Optimizer], ...] = (
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Adamax,
    ASGD,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SGD,
)
"""torch's optimizers that step every parameter by itself."""

_FULL_TENSORS = (Adafactor, Muon)


def _function(step: Callable[..., Any]) -> Any:
    """Return the function under the wrappers of torch, of schedulers and of the core."""
    inner = inspect.unwrap(step)
    return getattr(inner, "__func__", inner)


_STEPS = frozenset(_function(kind.step) for kind in _EACH_BY_ITSELF)


def steps_each_parameter(step: Callable[..., Any]) -> bool:
    """Return True if a step is torch's own, runs one closure and steps every parameter by itself.

    Example:
        >>> steps_each_parameter(AdamW([torch.zeros(1)]).step)
        True
        >>> steps_each_parameter(torch.optim.LBFGS([torch.zeros(1)]).step)
        False
    """
    return _function(step) in _STEPS


def needs_full_tensors(optimizer: Optimizer) -> bool:
    """Return True if an update reads full rows, columns or products, so that shards must communicate."""
    return isinstance(optimizer, _FULL_TENSORS)


def in_host_memory(parameter: Tensor) -> bool:
    """Return True if the CPU steps a parameter."""
    return parameter.device.type == "cpu"


def groups_for_step(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return param groups for one step that select the fused kernel; the user's groups are unchanged.

    In host memory torch runs a slow loop unless ``fused=True`` selects its fused kernel. Every tier selects
    it, so that all tiers give bitwise the same result. A kernel that the user chose stays.
    """
    return [split for group in optimizer.param_groups for split in _split(optimizer, group)]


def _split(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if group.get("fused"):
        for same in _alike(optimizer, group["params"]):
            yield {**group, "params": same}
    elif _may_be_fused(group):
        fused = [parameter for parameter in group["params"] if _can_be_fused(parameter)]
        others = [parameter for parameter in group["params"] if not _can_be_fused(parameter)]
        for same in _alike(optimizer, fused):
            yield {**group, "params": same, "fused": True}
        if others:
            yield {**group, "params": others}
    else:
        yield group


def _may_be_fused(group: dict[str, Any]) -> bool:
    """Return True if the class has a fused kernel and the user chose no kernel."""
    undecided = all(group.get(key) is None for key in ("fused", "foreach"))
    return "fused" in group and undecided and not (group.get("capturable") or group.get("differentiable"))


def _can_be_fused(parameter: Tensor) -> bool:
    if parameter.grad is not None and parameter.grad.is_sparse:
        return False
    # In 16 bits the fused kernel does not round like the user's own step.
    wide = parameter.dtype in (torch.float32, torch.float64)
    return wide and in_host_memory(parameter) and not isinstance(parameter, DTensor)


def _alike(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters that one fused kernel can step together."""
    # torch's fused SGD needs parameters that all have a momentum buffer, or all have none.
    if not isinstance(optimizer, SGD):
        if parameters:
            yield parameters
        return
    for started in (True, False):
        same = [
            p
            for p in parameters
            if (optimizer.state.get(p, {}).get("momentum_buffer") is not None) == started
        ]
        if same:
            yield same


class DeepSpeedAdam:
    """Steps the parameters of a shadow optimizer that DeepSpeed's CPU Adam kernel supports.

    It is not the default: its results differ from torch's in the last bits, and its first use compiles for
    minutes. The optimizer's state keeps torch's form, so checkpoints do not depend on the kernel.

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
        """Return True if an optimizer is Adam, and no loss scaler still has to unscale its gradients."""
        return isinstance(optimizer, Adam) and getattr(optimizer, "found_inf", None) is None

    def step(self, shadow: Optimizer) -> None:
        """Step the supported parameters and leave the others in the shadow's groups."""
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
            # DeepSpeed counts steps with an int, torch with a tensor: the engine gets a copy of the dict.
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
    """Return True if the kernel can step it: a contiguous float32 tensor, a gradient of the same strides."""
    grad = parameter.grad
    alike = grad is not None and grad.layout == torch.strided and grad.stride() == parameter.stride()
    return (
        alike and in_host_memory(parameter) and parameter.dtype == torch.float32 and parameter.is_contiguous()
    )


def _number(value: Any) -> float:
    return float(value)
