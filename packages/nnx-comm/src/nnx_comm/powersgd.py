"""PowerSGD: torch's own communication hook, on all gradients as one bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from nnx_comm.wire import Lossy, Sent

__all__ = ["PowerSGD"]

_BUCKET = 0


class PowerSGD(Lossy):
    """Sends two thin matrices in place of each gradient matrix.

    torch's hook computes and sends. This class gives it one bucket and keeps the error, so that a checkpoint
    has it by parameter.

    Args:
        rank: The rank of the matrices.
        start: The first steps average whole gradients.
        least: The smallest factor by which the matrices must be smaller.
    """

    def __init__(self, *, rank: int, start: int, least: float) -> None:
        super().__init__()
        self._hook = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            min_compression_rate=least,
            use_error_feedback=False,  # of `Averaging`
            warm_start=True,
        )
        self._count = 0

    def mean(self, values: Tensor, shapes: Sequence[torch.Size]) -> Sent:
        """Average the gradients of all ranks. Collective."""
        self._load(values)
        hook, count, ranks = self._hook, values.numel(), dist.get_world_size()
        compresses, before = hook.iter >= hook.start_powerSGD_iter, hook.total_numel_after_compression
        bucket = _Bucket(values.clone() if compresses else values, shapes)
        mean: Tensor = powerSGD_hook(hook, bucket).wait()  # torch's own class has no constructor
        sent = hook.total_numel_after_compression - before if compresses else count
        payload = 2 * (ranks - 1) * sent * values.element_size() // ranks
        self._describe()
        return Sent(mean, values - mean if compresses else None, payload)

    def payload(self, count: int, *, ranks: int, itemsize: int) -> int:
        """Return the bytes of the first steps; later they depend on the shapes."""
        return 2 * (ranks - 1) * count * itemsize // ranks

    def _describe(self) -> None:
        """Show the hook's state, without copying it."""
        self.state["iter"] = torch.tensor(self._hook.iter)
        self.state["count"] = torch.tensor(self._count)
        if _BUCKET in self._hook.p_memory_dict:
            self.state["p"] = self._hook.p_memory_dict[_BUCKET]
            self.state["q"] = self._hook.q_memory_dict[_BUCKET]

    def _load(self, values: Tensor) -> None:
        """Give the hook the state of a checkpoint; drop its matrices if the gradients are others."""
        hook = self._hook
        if "iter" in self.state:
            hook.iter, self._count = int(self.state["iter"]), int(self.state["count"])
        if "p" in self.state:
            hook.p_memory_dict[_BUCKET] = self.state["p"].to(values)
            hook.q_memory_dict[_BUCKET] = self.state["q"].to(values)
        if self._count != values.numel():
            self._count = values.numel()
            hook.p_memory_dict.clear()
            hook.q_memory_dict.clear()
            self.state.pop("p", None)
            self.state.pop("q", None)


class _Bucket:
    """The part of ``torch.distributed.GradBucket`` that the hook reads."""

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size]) -> None:
        self._flat = flat
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        self._gradients = [
            part.view(shape or (1,)) for part, shape in zip(parts, shapes, strict=True) if part.numel()
        ]

    def buffer(self) -> Tensor:
        """Return all gradients as one tensor."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return self._gradients

    def index(self) -> int:
        """Return the number of the bucket."""
        return _BUCKET

    def is_last(self) -> bool:
        """Return True: there is one bucket."""
        return True
