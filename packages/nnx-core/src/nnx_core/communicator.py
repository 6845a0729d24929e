"""Collectives on tensors of any shape, without autograd, for generated code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce

from nnx_core._torch_compat import all_gather_into, reduce_scatter_into

__all__ = ["Communicator", "GroupCommunicator"]


class Communicator(ABC):
    """Collectives over the ranks of a unit. They do not change arguments; results are new and contiguous.

    Attributes:
        rank: This rank's index within the unit.
        size: The number of ranks.
        threaded: True if the ranks are threads of one process, which share its random generators.
    """

    rank: int
    size: int
    threaded: bool = False

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of the ranks along a dim."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk along a dim of the sum over the ranks; the size divides the dim."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, split_dim: int, cat_dim: int) -> Tensor:
        """Split along one dim, send chunk r to rank r, and concatenate the received chunks along another."""

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return the same random tensor on every rank, which each draws from an equal generator state."""
        return draw()


class GroupCommunicator(Communicator):
    """Collectives over a process group; a unit of one rank needs none.

    Args:
        group: The unit's group; None for a unit of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:  # noqa: D102 # as the base class says
        result = tensor.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            all_reduce(result, group=self.group)
        return result

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:  # noqa: D102
        if self.group is None:
            return tensor.contiguous()
        tensor = tensor.contiguous()
        joined = tensor.new_empty((self.size * tensor.numel(),))
        all_gather_into(joined, tensor.view(-1), group=self.group)
        if dim == 0:
            return joined.view(-1, *tensor.shape[1:]) if tensor.ndim else joined
        return torch.cat(tuple(joined.view(self.size, *tensor.shape)), dim=dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:  # noqa: D102
        if self.group is None:
            return tensor.contiguous()
        chunks = tensor.chunk(self.size, dim)
        stacked = tensor.contiguous() if dim == 0 else torch.stack(chunks)
        result = tensor.new_empty(chunks[0].shape)
        reduce_scatter_into(result, stacked.view(-1, *result.shape[1:]), group=self.group)
        return result

    def all_to_all(self, tensor: Tensor, split_dim: int, cat_dim: int) -> Tensor:  # noqa: D102
        if self.group is None:
            return tensor.contiguous()
        sent = torch.stack(tensor.chunk(self.size, split_dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return torch.cat(tuple(received), dim=cat_dim)
