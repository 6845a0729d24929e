"""The ``rt`` of a generated program: conversions, and operators that differ on a shard.

The arithmetic is torch's own. An operator here adds a rank's share of a mask, a count or a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nnx_core.communicator import Communicator
from nnx_core.errors import UnsupportedError
from nnx_nnscaler._torch_compat import safe_softmax
from nnx_nnscaler.ir.placement import Placement

# A conversion changes a tensor's placement inside a program, and converts its gradient by the matching
# collective. Its name is ``forward__backward``. ``dim`` and ``groups`` describe the shard to make or to join,
# as in `nnx_nnscaler.ir.placement.S`.


_Change = Callable[[Tensor], Tensor]


class _Converted(torch.autograd.Function):
    """Applies one function to the value and another to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _Change, backward: _Change) -> Tensor:
        ctx.change = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if gradient.requires_grad:  # backward records with `create_graph`
            return _Once.apply(gradient, ctx.change), None, None  # type: ignore[no-untyped-call]
        return ctx.change(gradient), None, None


class _Once(torch.autograd.Function):
    """A gradient that refuses a derivative: the ranks' summands of a second derivative are unknown."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, change: _Change) -> Tensor:
        return change(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise UnsupportedError(
            "a second derivative is taken through a forward that several ranks compute as shards.",
            remedy="Use strategy 'nnscaler_dp', under which every rank computes the complete forward.",
        )


class Conversions:
    """The placement changes of one rank of a unit.

    Args:
        communicator: The collectives of the unit.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def part(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Return this rank's shard of a complete tensor."""
        if groups == 1:
            return tensor.chunk(self.size, dim)[self.rank].contiguous()
        return _grouped(tensor, dim, groups).chunk(self.size, dim + 1)[self.rank].flatten(dim, dim + 1)

    def whole(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Return the complete tensor, from every rank's shard."""
        if groups == 1:
            return self.communicator.all_gather(tensor, dim)
        grouped = _grouped(tensor, dim, groups)
        return self.communicator.all_gather(grouped, dim + 1).flatten(dim, dim + 1)

    def sum_part(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Return this rank's shard of the sum over the ranks."""
        if groups == 1:
            return self.communicator.reduce_scatter(tensor, dim)
        grouped = _grouped(tensor, dim, groups)
        return self.communicator.reduce_scatter(grouped, dim + 1).flatten(dim, dim + 1)

    def keep__all_reduce(self, tensor: Tensor) -> Tensor:
        """Keep the value; sum its gradient over the ranks, because each rank used it for its shard."""
        return self._converted(tensor, _same, self.communicator.all_reduce)

    def keep__divide(self, tensor: Tensor) -> Tensor:
        """Keep the value; divide its gradient by the ranks, because the reducer sums it over them."""
        return self._converted(tensor, _same, lambda gradient: gradient / self.size)

    def split__all_gather(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Convert R to S: split the value; gather its gradient."""
        return self._converted(
            tensor, lambda t: self.part(t, dim, groups), lambda g: self.whole(g, dim, groups)
        )

    def all_gather__split(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Convert S to R: gather the value; keep this rank's shard of its complete gradient."""
        return self._converted(
            tensor, lambda t: self.whole(t, dim, groups), lambda g: self.part(g, dim, groups)
        )

    def all_gather__reduce_scatter(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Convert S to R: gather the value; sum its partial gradients, and keep this rank's shard."""
        return self._converted(
            tensor, lambda t: self.whole(t, dim, groups), lambda g: self.sum_part(g, dim, groups)
        )

    def all_reduce__keep(self, tensor: Tensor) -> Tensor:
        """Convert P to R: sum the value; its gradient is complete."""
        return self._converted(tensor, self.communicator.all_reduce, _same)

    def all_reduce__all_reduce(self, tensor: Tensor) -> Tensor:
        """Convert P to R: sum the value; sum its partial gradients too."""
        return self._converted(tensor, self.communicator.all_reduce, self.communicator.all_reduce)

    def reduce_scatter__all_gather(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Convert P to S: keep this rank's shard of the sum; gather its gradient."""
        return self._converted(
            tensor, lambda t: self.sum_part(t, dim, groups), lambda g: self.whole(g, dim, groups)
        )

    def all_to_all__all_to_all(
        self, tensor: Tensor, dim: int, to_dim: int, groups: int = 1, to_groups: int = 1
    ) -> Tensor:
        """Convert S to S along another dim; its gradient takes the opposite way."""
        return self._converted(
            tensor,
            lambda t: self._exchanged(t, dim, to_dim, groups, to_groups),
            lambda g: self._exchanged(g, to_dim, dim, to_groups, groups),
        )

    def _exchanged(self, tensor: Tensor, dim: int, to_dim: int, groups: int, to_groups: int) -> Tensor:
        if groups == to_groups == 1:
            return self.communicator.all_to_all(tensor, to_dim, dim)
        return self.part(self.whole(tensor, dim, groups), to_dim, to_groups)

    def _converted(self, tensor: Tensor, forward: _Change, backward: _Change) -> Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            result: Tensor = _Converted.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
            return result
        return forward(tensor)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def join_parts(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the complete tensor, from its shards in the order of the ranks."""
    if placement.groups == 1:
        return torch.cat(list(parts), placement.dim)
    grouped = [torch.unflatten(part, placement.dim, (placement.groups, -1)) for part in parts]
    return torch.cat(grouped, placement.dim + 1).flatten(placement.dim, placement.dim + 1)


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Return the same tensor with a dim viewed as two: groups, and positions in a group."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


# Batch norm with statistics over the unit, which keeps running statistics equal on all ranks.


_CUDNN = False  # torch's own kernels run on any device, and their backward takes given statistics


class Normalization(Conversions):
    """Normalization of a shard of a batch or of its channels."""

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
        """Run batch norm in training on this rank's shard along any dim but the channels.

        Mean and variance are those of the complete batch; every rank updates its running statistics with
        them.
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
        """Run batch norm in training on this rank's channels; every rank updates all running statistics."""
        own = self.part(torch.stack((running_mean, running_var)), 1)
        mean, variance = own
        result = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, _CUDNN)
        with torch.no_grad():
            for running, updated in zip((running_mean, running_var), self.whole(own, 1), strict=True):
                running.copy_(updated)
        return result

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return mean and biased variance of each channel over the unit, and the number of values."""
        dims = [dim for dim in range(x.ndim) if dim != 1]
        values = x if x.dtype == torch.float64 else x.float()
        own_variance, own_mean = torch.var_mean(values, dims, correction=0)
        stacked = self.communicator.all_gather(torch.stack((own_mean, own_variance))[None], 0)
        means, variances = stacked.unbind(1)
        mean = means.mean(0)
        # All shards have equal sizes, so the variance is the mean variance within them plus that of their
        # means.
        variance = variances.mean(0) + (means - mean).square().mean(0)
        return mean, variance, x.numel() // x.shape[1] * self.size


class _Batch(NamedTuple):
    """The batch of a unit.

    Attributes:
        eps: The number that is added to the variance.
        values: The number of values behind each channel's statistics.
        all_reduce: The sum over the unit's ranks.
    """

    eps: float
    values: int
    all_reduce: Callable[[Tensor], Tensor]


class _UnitBatchNorm(torch.autograd.Function):
    """Normalizes with given statistics, which depend on the input of every rank."""

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
        # This term treats the statistics as constants. The next ones add the gradient through the statistics.
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


# Losses on shards of the samples, or of the classes, for generated programs.


class Losses(Conversions):
    """Losses of shards: means divide by the counts of all ranks, and sums over classes span the ranks."""

    def cross_entropy_mean(
        self,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return this rank's summand of the mean cross entropy over the samples of all ranks."""
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
        """Return this rank's summand of the mean cross entropy, from its scores and all ranks' targets."""
        losses = _cross_entropy(scores, self.part(target, 0), weight, ignore_index, label_smoothing)
        return _summand(losses, sample_weights(target, weight, ignore_index).to(_exact(scores)))

    def nll_loss_mean(
        self, scores: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100
    ) -> Tensor:
        """Return this rank's summand of the mean negative log likelihood over the samples of all ranks."""
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
        """Return the cross entropy of this rank's classes (dim 1) against targets among all classes.

        Args:
            scores: The scores of this rank's classes.
            target: The classes of all ranks' targets.
            reduction: 0 for the loss of every sample, 1 for their mean, 2 for their sum.
            ignore_index: The target of samples that do not count.
            label_smoothing: The share of the weight that is spread over all classes.

        Returns:
            The complete loss, on every rank; its gradient has to be complete.
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
        """Return the divisor of the sum over all ranks' samples."""
        return self.communicator.all_reduce(sample_weights(target, weight, ignore_index).to(_exact(like)))


class _ClassParts(torch.autograd.Function):
    """Return the cross entropy of every sample, with classes (the last dim) sharded."""

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
    """Return the loss of every sample."""
    return F.cross_entropy(
        scores,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def _summand(losses: Tensor, count: Tensor) -> Tensor:
    """Return these samples' contribution to the mean over `count`, in the dtype of the sum."""
    return (losses.sum(dtype=count.dtype) / count).to(losses.dtype)


def sample_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of every sample; without class weights, 1 for each that counts."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight.detach()[torch.where(counts, target, 0)] * counts).sum()


def _exact(like: Tensor) -> torch.dtype:
    """Return the dtype for sums."""
    return torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype


class Functions(Conversions):
    """Functions for summands, random numbers and sharded tables."""

    def once(self, tensor: Tensor) -> Tensor:
        """Return an addend of partial sums: itself on the first rank, zeros on the others."""
        return tensor if self.rank == 0 else tensor * 0

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return random numbers that all ranks share; every rank's generator advances equally."""
        return self.communicator.drawn(draw)

    def dropout(self, tensor: Tensor, p: float, dim: int | None = None, groups: int = 1) -> Tensor:
        """Apply dropout with this rank's shard of the mask that one process would draw.

        Args:
            tensor: The value, or this rank's shard of it.
            p: The probability of a zero.
            dim: The sharded dim; None for a replicated value.
            groups: The number of groups.
        """
        if dim is None and not self.communicator.threaded:
            return F.dropout(tensor, p, training=True)
        return tensor * self._mask(tensor, p, dim, groups)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        p: float,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        dim: int | None = None,
    ) -> Tensor:
        """Compute attention with this rank's shard of the dropout mask that one process would draw.

        Args:
            query: The query, complete or this rank's shard.
            key: The key, likewise.
            value: The value, likewise.
            attn_mask: A mask of positions that count, or an addend of the scores.
            p: The probability that dropout zeroes a weight.
            is_causal: True if a query sees keys up to its own position only.
            scale: The factor of the scores; by default one over the root of the number of features.
            enable_gqa: True if several query heads share one head of key and value.
            dim: The dim of the query along which the result is sharded; None for a replicated result.
        """
        if dim is None and not self.communicator.threaded:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights: Tensor = safe_softmax(scores, -1)
        return (weights * self._mask(weights, p, dim)) @ value

    def _mask(self, like: Tensor, p: float, dim: int | None = None, groups: int = 1) -> Tensor:
        """Return this rank's shard of a dropout mask of zeros and ``1 / (1 - p)``."""
        shape = list(like.shape)
        if dim is not None:
            shape[dim] *= self.size
        ones = torch.ones(shape, dtype=like.dtype, device=like.device)
        mask = self.drawn(lambda: F.dropout(ones, p, training=True))
        return mask if dim is None else self.part(mask, dim, groups)

    def embedding_rows(self, weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
        """Return summands of an embedding whose table is sharded by rows: zeros for rows of other ranks.

        Args:
            weight: This rank's rows.
            indices: The row numbers in the complete table.
            padding_idx: The row of the complete table that gets no gradient; -1 for none.
        """
        rows = weight.shape[0]
        local = indices - self.rank * rows
        mine = (local >= 0) & (local < rows)
        padding = padding_idx - self.rank * rows
        found = F.embedding(
            torch.where(mine, local, 0), weight, padding if padding_idx >= 0 and 0 <= padding < rows else None
        )
        return found.masked_fill(~mine.unsqueeze(-1), 0)


# All conversions and functions of one rank of a unit.


class Runtime(Functions, Losses, Normalization):
    """All functions that a program calls besides torch's.

    Args:
        communicator: The collectives of the unit.
        device: The device of the tensors that the program makes.
        loss_scale: A function that returns the factor of a loss in its backward; None if it is unknown.

    Example:
        >>> from nnx_core.communicator import GroupCommunicator
        >>> Runtime(GroupCommunicator(None)).once(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device | str = "cpu",
        loss_scale: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__(communicator)
        self.device = torch.device(device)
        self.loss_scale = loss_scale

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a replicated submodule in eager mode, with unsharded parameters."""
        from nnx_core.view.guard import guarded_mode

        with guarded_mode():
            return module(*args, **kwargs)

    @staticmethod
    def item(result: Any, key: str) -> Any:
        """Return the result of a replicated submodule under a name."""
        return result[key] if isinstance(result, Mapping) else getattr(result, key)

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the program without keeping its activations; backward calls it again."""
        if not torch.is_grad_enabled():
            return function(self, *args)
        from torch.utils.checkpoint import checkpoint

        from nnx_core.view.guard import local_mode

        def called(*args: Any) -> Any:
            with local_mode():  # backward runs outside of the program's local mode
                return function(self, *args)

        return checkpoint(called, *args, use_reentrant=False)
