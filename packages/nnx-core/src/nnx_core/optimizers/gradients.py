"""Operations on the ranks' local gradients: norms over all ranks, clipping, overflow detection, loss scaling.

They work on local tensors, so plain, DTensor and engine-owned gradients can be mixed, which
``torch.nn.utils.clip_grad_norm_`` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from nnx_base.ranks import is_distributed
from nnx_core._torch_compat import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div,
    foreach_mul_,
    foreach_norm,
    foreach_pow,
)
from nnx_core.errors import UnsupportedError

_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """One gradient on this rank.

    Attributes:
        local: The elements of this rank; the optimizer reads changes in place.
        replicas: The number of ranks that hold the same elements, so that a norm counts them once.
    """

    local: Tensor
    replicas: int


@torch.no_grad()
def gradients_of(optimizer: Optimizer, *, world_size: int) -> list[Gradient]:
    """Return handles on ``param.grad`` of an optimizer over plain (replicated) or DTensor parameters."""
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradients.append(_gradient(parameter.grad, world_size))
    return gradients


def _gradient(grad: Tensor, world_size: int) -> Gradient:
    if not isinstance(grad, DTensor):
        return Gradient(grad, world_size)
    if any(placement.is_partial() for placement in grad.placements):
        raise UnsupportedError(
            f"a gradient of shape {tuple(grad.shape)} is still partial over {grad.device_mesh}.",
            remedy="Reduce gradients before they are clipped, unscaled or stepped with.",
        )
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    replicas = math.prod(size for placement, size in sizes if isinstance(placement, Replicate))
    # A mesh may span a subset of the ranks (one expert, one pipeline stage). Other ranks hold no replicas.
    return Gradient(grad.to_local(), replicas)


@torch.no_grad()
def clip_gradients_by_norm(
    gradients: Sequence[Gradient],
    *,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`. Collective.

    Args:
        gradients: This rank's gradients.
        max_norm: Upper bound of the norm.
        norm_type: The order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise instead of scaling by a non-finite norm.
        device: The device on which the norm is reduced.

    Returns:
        The norm before clipping, 0-d, equal on every rank.

    Raises:
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
        UnsupportedError: A gradient is sparse; torch has no norm for it.
    """
    _refuse_sparse(gradients)
    total = _global_norm(gradients, norm_type, device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it cannot be "
            "clipped. Set `error_if_nonfinite=False` to scale by the non-finite norm anyway."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _scale(gradients, factor)
    return total


@torch.no_grad()
def clip_gradients_by_value(gradients: Sequence[Gradient], clip_value: float) -> None:
    """Clamp every element of gradients in place.

    Raises:
        UnsupportedError: A gradient is sparse, which torch does not clamp.
    """
    _refuse_sparse(gradients)
    for group in _alike(gradient.local for gradient in gradients):
        foreach_clamp_min_(group, -clip_value)
        foreach_clamp_max_(group, clip_value)


def refuse_complex_clamp(optimizer: Optimizer) -> None:
    """Refuse to clip complex gradients by value, as torch does: complex numbers have no order.

    It checks parameters, which every rank has, so all ranks raise.

    Raises:
        UnsupportedError: The optimizer has complex parameters.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.is_complex():
            raise UnsupportedError(
                f"the gradient of a complex parameter of shape {tuple(parameter.shape)} cannot be clipped by "
                "value, as torch cannot clamp complex numbers.",
                remedy="Clip by norm: gradient_clip_algorithm='norm'.",
            )


def refuse_sparse_layers(module: nn.Module, *, engine: str) -> None:
    """Refuse layers with sparse gradients, for engines that shard gradients.

    Args:
        module: The module to train.
        engine: The name of the engine, for the message.

    Raises:
        UnsupportedError: A trained embedding has sparse gradients.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise UnsupportedError(
                f"{name or 'the model'} is an {type(layer).__name__} with sparse=True, and {engine} cannot "
                "shard sparse gradients.",
                remedy=f"Pass sparse=False to {name or 'it'}, or use 'nnscaler_zero' or 'ddp'.",
            )


def refuse_sparse_gradient(gradient: Tensor, name: str) -> None:
    """Refuse a sparse gradient, for engines that shard gradients.

    `refuse_sparse_layers` sees layers alone, not calls such as ``functional.embedding(..., sparse=True)``.

    Args:
        gradient: This rank's gradient.
        name: The name of the parameter.

    Raises:
        UnsupportedError: The gradient is sparse.
    """
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name!r} is sparse, and this strategy cannot shard sparse gradients.",
            remedy="Pass sparse=False to `torch.nn.functional.embedding` or `embedding_bag`, or use "
            "'nnscaler_zero' or 'ddp'.",
        )


def _refuse_sparse(gradients: Sequence[Gradient]) -> None:
    for gradient in gradients:
        if gradient.local.layout is not torch.strided:
            raise UnsupportedError(
                f"a sparse gradient of shape {tuple(gradient.local.shape)} cannot be clipped: torch has no "
                "norm of it and does not clamp it.",
                remedy="Pass sparse=False to nn.Embedding and nn.EmbeddingBag, or do not clip.",
            )


def _alike(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors by device and dtype, so that one kernel can process a group."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from groups.values()


def _scale(gradients: Sequence[Gradient], factor: Tensor) -> None:
    """Multiply in place; the factor is copied once to each device."""
    factors = {device: factor.to(device) for device in {gradient.local.device for gradient in gradients}}
    for group in _alike(gradient.local for gradient in gradients if gradient.local.layout is torch.strided):
        foreach_mul_(group, factors[group[0].device].to(group[0].dtype))
    for gradient in gradients:
        if gradient.local.layout is not torch.strided:
            gradient.local.mul_(factors[gradient.local.device].to(gradient.local.dtype))


def _global_norm(gradients: Sequence[Gradient], norm_type: float, device: torch.device) -> Tensor:
    wide = any(gradient.local.dtype in _WIDE for gradient in gradients)
    dtype = torch.float64 if wide else torch.float32
    counted = [gradient for gradient in gradients if gradient.local.numel()]
    none = torch.zeros((), dtype=dtype, device=device)
    norms = _norms([gradient.local for gradient in counted], norm_type, dtype, device) or (none,)
    if math.isinf(norm_type):
        return _all_reduce(torch.stack(norms).max(), dist.ReduceOp.MAX)
    replicas = [gradient.replicas for gradient in counted] or [1]
    powers = foreach_div(foreach_pow(norms, norm_type), replicas)
    return _all_reduce(torch.stack(powers).sum(), dist.ReduceOp.SUM).pow(1.0 / norm_type)


def _norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the norms of tensors on `device`, in order: the order affects the last bit of their sum."""
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    norms: dict[int, Tensor] = {}
    for group in _alike(real):
        found = torch.stack(foreach_norm(group, order, dtype)).to(device)
        norms.update(zip(map(id, group), found.unbind(), strict=True))
    return tuple(norms[id(tensor)] for tensor in real)


def _all_reduce(value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if is_distributed():
        # One rank may hold only float64 gradients, so all ranks reduce in float64.
        wide = value.double()
        all_reduce(wide, op=op)
        return wide.to(value.dtype)
    return value


@torch.no_grad()
def unscale_gradients(gradients: Sequence[Gradient], inverse_scale: Tensor, device: torch.device) -> Tensor:
    """Multiply gradients by `inverse_scale` in place, and detect overflow on any rank. Collective.

    Returns:
        ``found_inf``: a float32 tensor of shape ``(1,)`` on `device`, 1.0 if any rank has a non-finite value.
    """
    _scale(gradients, inverse_scale)
    found = torch.zeros(1, dtype=torch.float32, device=device)
    values = (_values(gradient.local) for gradient in gradients)
    for group in _alike(tensor for tensor in values if tensor.numel()):
        # The largest absolute value is not finite exactly if one of the values is not.
        largest = torch.stack(foreach_norm(group, math.inf)).max()
        found = torch.maximum(found, (~torch.isfinite(largest)).to(device, torch.float32))
    if is_distributed():
        all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient as real numbers."""
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values


class ParallelGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that unscales each rank's gradients, and reduces ``found_inf`` over all ranks.

    torch's own reads only this rank's gradients, so with sharded gradients one rank may skip a step that the
    others take.

    Args:
        gradients: Returns this rank's gradients of an optimizer.
        device: The device of the gradients.
        replaces: The scaler with the settings and the state to take over.
    """

    def __init__(
        self,
        gradients: Callable[[Optimizer], Sequence[Gradient]],
        device: torch.device,
        *,
        replaces: torch.amp.GradScaler,
    ) -> None:
        self._nnx_gradients, self._nnx_device = gradients, device
        if not replaces.is_enabled():  # a disabled scaler has no settings
            super().__init__(device=device.type, enabled=False)
            return
        super().__init__(
            device=device.type,
            init_scale=replaces.get_scale(),
            growth_factor=replaces.get_growth_factor(),
            backoff_factor=replaces.get_backoff_factor(),
            growth_interval=replaces.get_growth_interval(),
        )

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step if the gradients on all ranks are finite.

        A fused optimizer gets ``found_inf`` and decides by itself. If its parameters are in CPU memory and
        ``found_inf`` on a GPU, torch copies it asynchronously, and the optimizer would read an old value. So
        this method synchronizes and decides itself.
        """
        if not (getattr(optimizer, "_step_supports_amp_scaling", False) and self._is_elsewhere(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Return True if a parameter is in CPU memory and the gradients' device is another."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return self._nnx_device.type != "cpu" and any(p.device.type == "cpu" for p in parameters)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch 2.11-2.13 call this hook from `unscale_` and `step`; its ShardedGradScaler overrides it too.
        found = unscale_gradients(self._nnx_gradients(optimizer), inv_scale, self._nnx_device)
        return {self._nnx_device: found}
