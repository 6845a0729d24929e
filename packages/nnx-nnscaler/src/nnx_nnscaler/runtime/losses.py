"""Losses over parts of the samples, or of the classes, as emitted programs call them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 # the field writes it so
from torch import Tensor

from nnx_nnscaler.runtime.communicator import Communicator
from nnx_nnscaler.runtime.conversions import Conversions

__all__ = ["Losses"]


class Losses(Conversions):
    """Means count what all ranks have; classes are summed over the ranks that have them."""

    def cross_entropy_mean(
        self,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """This rank's summand of the mean cross entropy over the samples of all ranks."""
        losses = _cross_entropy(scores, target, weight, ignore_index, label_smoothing)
        if target.is_floating_point():
            count = torch.full((), losses.numel() * self.size, dtype=_exact(scores), device=scores.device)
        else:
            count = self._count(target, weight, ignore_index, scores)
        return _summand(losses, count)

    def cross_entropy_of_part(
        self,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """This rank's summand of the mean cross entropy, from its scores and the targets of all ranks."""
        losses = _cross_entropy(scores, self.part(target, 0), weight, ignore_index, label_smoothing)
        return _summand(losses, _weights(target, weight, ignore_index).to(_exact(scores)))

    def nll_loss_mean(
        self, scores: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100
    ) -> Tensor:
        """This rank's summand of the mean negative log likelihood over the samples of all ranks."""
        losses = F.nll_loss(scores, target, weight, ignore_index=ignore_index, reduction="none")
        return _summand(losses, self._count(target, weight, ignore_index, scores))

    def vocabulary_cross_entropy(
        self,
        scores: Tensor,
        target: Tensor,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Cross entropy of this rank's classes, which are dim 1, against targets among all of them.

        Args:
            scores: This rank's scores.
            target: Classes of all ranks.
            reduction: 0 for the loss of every sample, 1 for their mean, 2 for their sum.
            ignore_index: Target of samples that do not count.
            label_smoothing: How much of the weight goes to all classes alike.

        Returns:
            The whole loss, on every rank; its gradient has to be complete.
        """
        counts = target != ignore_index
        by_sample = scores.movedim(1, -1).to(_exact(scores))
        losses: Tensor = _ClassParts.apply(by_sample, target, counts, label_smoothing, self.communicator)  # type: ignore[no-untyped-call]
        if reduction == 1:
            losses = losses.sum() / counts.sum()
        elif reduction == 2:
            losses = losses.sum()
        return losses.to(scores.dtype)

    def _count(self, target: Tensor, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
        """By what the sum over all ranks' samples is divided."""
        return self.communicator.all_reduce(_weights(target, weight, ignore_index).to(_exact(like)))


class _ClassParts(torch.autograd.Function):
    """Cross entropy of every sample, with the classes, which are the last dim, in parts."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, counts: Tensor, smoothing: float, communicator: Communicator
    ) -> Tensor:
        classes = scores.shape[-1]
        highest = communicator.all_gather(scores.amax(-1).unsqueeze(0), 0).amax(0)
        shifted = scores - highest.unsqueeze(-1)
        local = target - communicator.rank * classes
        mine = counts & (local >= 0) & (local < classes)
        local = torch.where(mine, local, 0).unsqueeze(-1)
        aimed = shifted.gather(-1, local).squeeze(-1).masked_fill(~mine, 0)
        powers = shifted.exp()
        summands = [powers.sum(-1), aimed]
        if smoothing:
            summands.append(shifted.sum(-1))
        sums = communicator.all_reduce(torch.stack(summands))
        log_total = sums[0].log()
        losses = log_total - sums[1]
        if smoothing:
            of_all = log_total - sums[2] / (classes * communicator.size)
            losses = (1 - smoothing) * losses + smoothing * of_all
        ctx.save_for_backward(powers / sums[0].unsqueeze(-1), local, mine, counts)
        ctx.smoothing, ctx.classes = smoothing, classes * communicator.size
        return losses.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chances, local, mine, counts = ctx.saved_tensors
        wanted = mine.to(chances.dtype).unsqueeze(-1) * (1 - ctx.smoothing)
        difference = chances.scatter_add(-1, local, -wanted)
        if ctx.smoothing:
            difference -= ctx.smoothing / ctx.classes
        return difference * (gradient * counts).unsqueeze(-1), None, None, None, None


def _cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The loss of every sample."""
    return F.cross_entropy(
        scores,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def _summand(losses: Tensor, count: Tensor) -> Tensor:
    """What these samples contribute to the mean over as many as `count` says, in its dtype to add up in."""
    return (losses.sum(dtype=count.dtype) / count).to(losses.dtype)


def _weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """How many samples count, or how much."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight.detach()[torch.where(counts, target, 0)] * counts).sum()


def _exact(like: Tensor) -> torch.dtype:
    """The dtype to add up in."""
    return torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
