"""QAdam: Adam whose momentum travels between the ranks after a warm-up, and the exchange of that momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_comm.algorithm import Averaging, Tensors
from nnx_comm.wire import Exact, Wire
from nnx_core.errors import OptionError

__all__ = ["Momenta", "QAdam"]


class QAdam(Optimizer):
    """Adam with a second moment that stays as it is after the warm-up.

    Then a step is linear in the gradient, so that ranks may send the momentum in few bytes: `bagua_qadam`
    does so. Under any other strategy this is an ordinary optimizer. Its state has the names of Adam's.

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        betas: The decay of the momentum and of the second moment.
        eps: Added to the denominator.
        weight_decay: An L2 penalty, added to the gradient.
        warmup_steps: The first steps, which update the second moment: a sixth of the run or more, and not
            before the learning rate has reached its maximum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
    ) -> None:
        if not (warmup_steps >= 1 and 0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise OptionError(
                f"QAdam(betas={betas!r}, warmup_steps={warmup_steps!r}) cannot train.",
                remedy="Pass betas from 0 to below 1, and at least one warm-up step.",
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "warmup_steps": warmup_steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; return the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        step, warmup, square = int(state["step"]), group["warmup_steps"], state["exp_avg_sq"]
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        if step <= warmup:
            square.mul_(beta2).addcmul_(gradient, gradient.conj(), value=1 - beta2)
        if step == warmup:
            square.div_(1 - beta2**step)  # from now on, as it is, not biased towards its start of zero
        scale = 1 - beta2**step if step < warmup else 1.0
        denominator = square.div(scale).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-float(group["lr"]) / (1 - beta1**step))


class Momenta(Averaging):
    """Averages gradients in the warm-up of `QAdam`, and its momenta through a wire after it.

    A momentum is the gradient plus what the optimizer has kept, so ranks add that before the exchange and
    subtract it after: clipping and the optimizer see an average gradient as ever.
    """

    kind = "momenta"

    def __init__(self, wire: Wire, *, error_feedback: bool) -> None:
        super().__init__(wire, error_feedback=error_feedback)
        self.optimizers: Sequence[Optimizer] = ()
        self._exact = Averaging(Exact())

    @torch.no_grad()
    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Replace the gradients by averages over the ranks. Collective."""
        kept = {parameter: value for parameter, value in self._kept() if parameter in tensors}
        early = {parameter: each for parameter, each in tensors.items() if parameter not in kept}
        momenta: dict[nn.Parameter, Tensor] = {
            parameter: each + kept[parameter] for parameter, each in tensors.items() if parameter in kept
        }
        payload = self._exact.exchange(early, step=step) + super().exchange(momenta, step=step)
        for parameter, momentum in momenta.items():
            tensors[parameter].copy_(momentum - kept[parameter])
        return payload

    def _kept(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Yield what the next momentum keeps of the last one, divided by the weight of a gradient in it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                factor = self.scale * group["betas"][0] / (1 - group["betas"][0])
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if state and int(state["step"]) >= group["warmup_steps"]:
                        momentum = state["exp_avg"]
                        yield (
                            parameter,
                            momentum.to(torch.promote_types(momentum.dtype, torch.float32)) * factor,
                        )
