"""The arithmetic that both strategies share: all ranks start alike, and gradients become their mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average_gradients", "take_from_rank_zero"]


def take_from_rank_zero(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors by rank 0's values. Collective."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(module: nn.Module, *, bucket_megabytes: float) -> None:
    """Replace every gradient by its mean over all ranks, a bucket at a time. Collective."""
    for bucket in _buckets(_gradients(module), limit=bucket_megabytes * 2**20):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, averaged in zip(bucket, torch.split(flat, sizes), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def _gradients(module: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that some rank has, with zeros if this rank has none."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, is_used in zip(trained, used.tolist(), strict=True):
        if is_used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif is_used and parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()  # the ranks have different rows
        if parameter.grad is not None:
            yield parameter.grad


def _buckets(gradients: Iterable[Tensor], *, limit: float) -> Iterator[list[Tensor]]:
    """Split gradients into buckets of one dtype, up to a size in bytes."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        size = sum(g.nbytes for g in bucket) + gradient.nbytes
        if bucket and (gradient.dtype != bucket[0].dtype or size > limit):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
