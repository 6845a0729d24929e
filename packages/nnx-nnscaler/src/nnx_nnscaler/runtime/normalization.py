"""Batch norm whose statistics span the unit, and what keeps running statistics equal on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nnx_nnscaler.runtime.conversions import Conversions

__all__ = ["Normalization"]

_CUDNN = False  # torch's own kernels, which any device has and whose backward takes given statistics


class Normalization(Conversions):
    """Normalisation on parts of a batch or of its channels."""

    def batch_norm_over_unit(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Batch norm in training of this rank's part along any dim but the channels.

        Mean and variance are those of the whole batch; every rank updates its running statistics with them.
        """
        mean, variance, count = self._statistics(x.detach())
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                unbiased = variance * (count / (count - 1)) if count > 1 else variance
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        batch = _Batch(eps, count, self.communicator.all_reduce)
        result: Tensor = _UnitBatchNorm.apply(x, weight, bias, mean, variance, batch)  # type: ignore[no-untyped-call]
        return result

    def batch_norm_of_channels(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Batch norm in training of this rank's channels; every rank's running statistics stay whole."""
        own = self.part(torch.stack((running_mean, running_var)), 1)
        mean, variance = own
        result = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, _CUDNN)
        with torch.no_grad():
            for running, updated in zip((running_mean, running_var), self.whole(own, 1), strict=True):
                running.copy_(updated)
        return result

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Mean and biased variance of each channel over the unit, and how many values they are of."""
        dims = [dim for dim in range(x.ndim) if dim != 1]
        values = x if x.dtype == torch.float64 else x.float()
        own_variance, own_mean = torch.var_mean(values, dims, correction=0)
        stacked = self.communicator.all_gather(torch.stack((own_mean, own_variance))[None], 0)
        means, variances = stacked.unbind(1)
        mean = means.mean(0)
        # The parts are of equal size, so the variance is that within them plus that between their means.
        variance = variances.mean(0) + (means - mean).square().mean(0)
        return mean, variance, x.numel() // x.shape[1] * self.size


class _Batch(NamedTuple):
    """The batch of a unit.

    Attributes:
        eps: What is added to the variance.
        values: How many values each channel's statistics are of.
        all_reduce: Sums over the unit's ranks.
    """

    eps: float
    values: int
    all_reduce: Callable[[Tensor], Tensor]


class _UnitBatchNorm(torch.autograd.Function):
    """Normalises with given statistics that depend on the input of every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        batch: _Batch,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.batch, ctx.has_bias = batch, bias is not None
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, batch.eps, _CUDNN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        # As if the statistics were constants; the rest is what each value changes through them.
        direct, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            *(gradient.contiguous(), x, scale, mean, variance, None, None, False, ctx.batch.eps, [True] * 3)
        )
        to_weight_of_all, to_bias_of_all = ctx.batch.all_reduce(torch.stack((to_weight, to_bias)))
        shape = (1, -1, *(1,) * (x.ndim - 2))
        inverse = (variance + ctx.batch.eps).rsqrt()
        shift = (scale * inverse * to_bias_of_all / ctx.batch.values).view(shape)
        slope = (scale * inverse.square() * to_weight_of_all / ctx.batch.values).view(shape)
        indirect = (x - mean.view(shape)).mul_(slope).add_(shift)
        to_input = (direct - indirect).to(x.dtype)
        to_scale = None if weight is None else to_weight.to(weight.dtype)
        return to_input, to_scale, to_bias if ctx.has_bias else None, None, None, None
