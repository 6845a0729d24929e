"""fairscale's ShardedDataParallel (0.4.13) beside a module, its reductions started in one order on all ranks.

fairscale starts a reduction when the last gradient of its buffer is there, in whatever order that happens on
a rank. Ranks that use different parameters then reduce different buffers with each other, or die of buffers
of different sizes. Here reductions form a queue, the same on every rank, as those of DDP do: each starts when
it and all before it are complete, and those that a backward did not complete start when it ends.

Every private name of ShardedDataParallel that nnx uses is in this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from torch import Tensor, nn

from nnx_core.errors import UnsupportedError


class Reduction:
    """What is reduced to one owner at a time: a buffer of fairscale's, or a gradient too large for one.

    Args:
        parameters: The parameters whose gradients it reduces.
        destination: The rank that owns them.
        bucket: The buffer of fairscale's; None for a single gradient.
        in_half: True if it is reduced in float16.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        destination: int,
        *,
        bucket: Any = None,
        in_half: bool = False,
    ) -> None:
        self.parameters = parameters
        self.destination = destination
        self.bucket = bucket
        self.missing: set[nn.Parameter] = set()
        self.is_started = True
        self._in_half = in_half
        self._work: Any = None
        self._sent: Tensor | None = None

    def expect(self) -> None:
        """A backward begins."""
        self.missing = set(self.parameters)
        self.is_started = False

    def start(self) -> None:
        """Send what is there; what this rank has not used is zero."""
        self.is_started = True
        self._sent = self._whole().mul_(1.0 / dist.get_world_size())
        if self._in_half:
            self._sent = self._sent.half()
        self._work = dist.reduce(self._sent, self.destination, async_op=True)

    def _whole(self) -> Tensor:
        if self.bucket is not None:
            buffer: Tensor = self.bucket.buffer
            return buffer
        (parameter,) = self.parameters
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse or not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.to_dense().contiguous()
        return parameter.grad

    def wait(self) -> None:
        """Wait for what was sent; only the owner has gradients then."""
        self._work.wait()
        if dist.get_rank() != self.destination:
            for parameter in self.parameters:
                parameter.grad = None
            if self.bucket is not None:
                self.bucket.buffer = self.bucket.buffer.new_empty(0)
        elif self._in_half and self._sent is not None and self.parameters[0].grad is not None:
            self.parameters[0].grad.copy_(self._sent)
        self._work = self._sent = None


class Queue:
    """The reductions of a backward in the order that they start in.

    Args:
        reductions: The reductions in the order in which a backward is likely to complete them.
    """

    def __init__(self, reductions: Iterable[Reduction]) -> None:
        self._reductions = list(reductions)
        self._of = {p: reduction for reduction in self._reductions for p in reduction.parameters}
        self._waiting: deque[Reduction] = deque()
        self._is_open = False

    def begin(self) -> None:
        """A backward begins that reduces."""
        self._is_open = True
        for reduction in self._reductions:
            reduction.expect()
        self._waiting = deque(self._reductions)

    def complete(self, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is there.

        Raises:
            UnsupportedError: The strategy does not know of this backward, or the parameter had a gradient
                in it already that is under way.
        """
        if not self._is_open:
            raise UnsupportedError(
                "`backward` was called on a tensor itself, so its gradients would not be reduced.",
                remedy="Call `self.manual_backward(loss)`, or `fabric.backward(loss)`.",
            )
        reduction = self._of[parameter]
        if reduction.is_started:
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward after "
                "the first was sent to its owner.",
                remedy="Recompute activations with `use_reentrant=False`, or use strategy 'fairscale_oss'.",
            )
        reduction.missing.discard(parameter)
        while self._waiting and not self._waiting[0].missing:
            self._waiting.popleft().start()

    def finish(self) -> None:
        """The backward has ended: start what it did not complete, and wait for all."""
        self._is_open = False
        while self._waiting:
            self._waiting.popleft().start()
        for reduction in self._reductions:
            reduction.wait()


class BufferedGradients(ShardedDataParallel):  # type: ignore[misc] # fairscale has no types
    """fairscale's buffers and hooks for the parameters of one dtype; its forward is not used.

    Args:
        module: The user's.
        parts: The OSS of these parameters, of each optimizer.
        complete: Called with each parameter whose gradient is there.
        reduce_buffer_size: The same as fairscale's.
        reduce_fp16: The same as fairscale's.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Any],
        complete: Callable[[nn.Parameter], None],
        *,
        reduce_buffer_size: int,
        reduce_fp16: bool,
    ) -> None:
        self._complete = complete
        super().__init__(
            module,
            list(parts),
            broadcast_buffers=False,
            sync_models_at_startup=False,
            reduce_buffer_size=reduce_buffer_size,
            reduce_fp16=reduce_fp16,
            auto_refresh_trainable=False,
        )

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients stay on this rank."""
        return bool(self._should_accumulate_grads)

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._should_accumulate_grads = value

    def _get_reduce_fn(self, index: int, param: nn.Parameter, dst_rank: int) -> Callable[..., None]:
        def reduce(*_: Any) -> None:
            if not self._should_accumulate_grads:
                self._complete(param)

        return reduce

    def reductions(self) -> list[Reduction]:
        """One for each buffer, and one for each parameter that is in none."""
        found = [Reduction(bucket._params, bucket.destination, bucket=bucket) for bucket in self._bucket_list]
        inside = {parameter for reduction in found for parameter in reduction.parameters}
        for parameter, owner in self._trainable_param_to_rank.items():
            if parameter not in inside:
                found.append(Reduction([parameter], owner, in_half=self._reduce_fp16))
        return [reduction for reduction in found if reduction.parameters]

    @torch.no_grad()
    def attach(self) -> None:
        """Make gradients views on the buffers again; those that were None are zero then."""
        for bucket in self._bucket_list:
            if not bucket.buffer.numel():
                bucket.buffer = bucket.buffer.new_empty(bucket._fill)
            begin = 0
            for parameter in bucket._params:
                view = bucket.buffer[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
                parameter.grad = view

    def remove(self) -> None:
        """Take the hooks off."""
        while self._grad_hooks:
            self._grad_hooks.pop().remove()


def in_order_of_backward(
    reductions: Iterable[Reduction], order: Mapping[nn.Parameter, int]
) -> list[Reduction]:
    """Reductions as a backward completes them that goes through the parameters from last to first."""
    return sorted(reductions, key=lambda reduction: -min(order.get(p, -1) for p in reduction.parameters))
