"""The contract of an algorithm: it exchanges tensors between the ranks, and names its state.

An algorithm knows no Trainer, no checkpoint and no optimizer. `nnx_comm.gradients` and `nnx_comm.replicas`
call it at the right moment of a step, and `nnx_comm.state` stores its state for any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_comm.wire import Exact, Lossy, Wire, add_over_ranks
from nnx_core._torch_compat import foreach_copy_

__all__ = ["Algorithm", "Averaging", "Tensors", "all_finite", "flatten", "mean_of", "parts_of", "real_view"]

Tensors = Mapping[nn.Parameter, Tensor]
"""Gradients or weights of this rank, by parameter, in an order that is equal on all ranks."""


class Algorithm(ABC):
    """An exchange between the ranks.

    Attributes:
        kind: Names its state in checkpoints: an algorithm of another kind does not read it.
        own: State of this rank alone, by parameter and name, such as the error of a codec.
        shared: State that is equal on all ranks, by parameter and name, such as an outer momentum.
        common: State that is equal on all ranks and belongs to no parameter, such as a counter.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.own: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.shared: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.common: dict[str, Tensor] = {}

    @abstractmethod
    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Exchange tensors in place. Collective.

        Args:
            tensors: Gradients before a step, or weights after it.
            step: The number of optimizer steps, this one included.

        Returns:
            The bytes that this rank sent.
        """

    def combine(
        self, name: str, read: Callable[[int], Tensor], *, saved: int, rank: int, ranks: int
    ) -> Tensor | None:
        """Return a tensor of `own` from those of a checkpoint.

        With as many ranks each gets its own. With another number each gets an equal share of the sum over the
        ranks that saved: what was not sent yet is neither lost nor sent twice.

        Args:
            name: The name of the tensor.
            read: Returns the tensor of a rank that saved.
            saved: The number of ranks that saved.
            rank: This rank.
            ranks: The number of ranks now.
        """
        if saved == ranks:
            return read(rank)
        total = read(0)
        for other in range(1, saved):
            total = total + read(other)
        return total / ranks


class Averaging(Algorithm):
    """Averages tensors over the ranks through a wire.

    Args:
        wire: The form of the numbers between the ranks.
        error_feedback: Add to the next exchange what the wire has lost in this one.

    Attributes:
        scale: The factor of the tensors, a loss scale; the errors are kept without it.
    """

    kind = "gradients"

    def __init__(self, wire: Wire, *, error_feedback: bool = True) -> None:
        super().__init__()
        self.wire = wire
        self.keeps_error = error_feedback and isinstance(wire, Lossy)
        self.scale = 1.0
        self._buffers: dict[tuple[object, ...], tuple[Tensor, list[Tensor]]] = {}
        self.common = wire.state

    @torch.no_grad()
    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Replace the tensors by their mean over the ranks. Collective."""
        real = {parameter: real_view(tensor) for parameter, tensor in tensors.items()}
        if isinstance(self.wire, Lossy):
            return self._exchange_lossy(self.wire, real)
        return sum(self._exchange_exact(group) for group in _by_dtype(real))

    def _exchange_exact(self, tensors: dict[nn.Parameter, Tensor]) -> int:
        """Sum as ``ddp`` does: values are divided first, in memory that the next exchange uses again."""
        ranks, values = dist.get_world_size(self.wire.group), list(tensors.values())
        key = values[0].device, values[0].dtype, tuple(tensor.shape for tensor in values)
        if key not in self._buffers:
            flat = values[0].new_empty(sum(tensor.numel() for tensor in values))
            self._buffers[key] = flat, list(parts_of(flat, tensors))
        flat, parts = self._buffers[key]
        foreach_copy_(parts, values)
        add_over_ranks(flat.mul_(1 / ranks), self.wire.group)
        foreach_copy_(values, parts)
        return self.wire.payload(flat.numel(), ranks=ranks, itemsize=flat.element_size())

    def _exchange_lossy(self, wire: Lossy, tensors: dict[nn.Parameter, Tensor]) -> int:
        """Exchange all tensors as one, in float32 or wider, with the errors of the last exchange."""
        if not any(tensor.numel() for tensor in tensors.values()):
            return 0
        flat = flatten(tensors.values())
        if self.scale != 1:
            flat.div_(self.scale)
        if self.keeps_error:
            for part, parameter in zip(parts_of(flat, tensors), tensors, strict=True):
                if parameter in self.own:
                    part.add_(self.own[parameter]["error"])
        sent = wire.mean(flat, [tensor.shape for tensor in tensors.values()])
        mean = sent.mean if self.scale == 1 else sent.mean * self.scale
        for tensor, part in zip(tensors.values(), parts_of(mean, tensors), strict=True):
            tensor.copy_(part)
        self._keep(sent.error, tensors)
        return sent.payload

    def _keep(self, error: Tensor | None, tensors: dict[nn.Parameter, Tensor]) -> None:
        """Keep the error of an exchange; one that lost nothing has sent the errors before it, too."""
        if not self.keeps_error:
            return
        for parameter in tensors:
            self.own.pop(parameter, None)
        if error is not None:
            for parameter, part in zip(tensors, parts_of(error, tensors), strict=True):
                self.own[parameter] = {"error": part}


def all_finite(tensors: Tensors) -> bool:
    """Return True if this rank's tensors have only finite numbers."""
    largest = [tensor.abs().amax().double() for tensor in tensors.values() if tensor.numel()]
    return not largest or bool(torch.isfinite(torch.stack([each.cpu() for each in largest])).all())


def mean_of(tensors: Tensors) -> dict[nn.Parameter, Tensor]:
    """Return the mean of each tensor over the ranks, in new memory. Collective."""
    means = {parameter: tensor.detach().clone() for parameter, tensor in tensors.items()}
    Averaging(Exact()).exchange(means, step=0)
    return means


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all elements as one tensor, in float32 or wider."""
    flat = [real_view(tensor).reshape(-1) for tensor in tensors]
    wide = any(tensor.dtype == torch.float64 for tensor in flat)
    return torch.cat([tensor.to(torch.float64 if wide else torch.float32) for tensor in flat])


def parts_of(flat: Tensor, tensors: Tensors) -> Iterator[Tensor]:
    """Yield the part of a flat tensor that belongs to each tensor, in the shape of its real view."""
    shapes = [real_view(tensor).shape for tensor in tensors.values()]
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    for part, shape in zip(parts, shapes, strict=True):
        yield part.view(shape)


def _by_dtype(tensors: dict[nn.Parameter, Tensor]) -> list[dict[nn.Parameter, Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], dict[nn.Parameter, Tensor]] = {}
    for parameter, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), {})[parameter] = tensor
    return list(groups.values())


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
