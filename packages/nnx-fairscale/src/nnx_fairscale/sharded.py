"""Train with fairscale's ShardedDataParallel (``fairscale_sharded``), made correct on torch 2 and later.

It reduces each gradient to the owner of the parameter, in buffers, and ``param.grad`` must be a view of a
buffer. Since torch 2.0 ``zero_grad`` sets gradients to None. The next backward then creates gradients outside
of the buffers, and from the second step on every rank would silently train alone. `_ShardedModule.prepare`
makes gradients views again before each backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx_base.ranks import is_distributed
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.optimizers.own_optimizers import no_optimizer, refuse_no_optimizer
from nnx_fairscale.options import ShardedOptions
from nnx_fairscale.oss import OwnedParameters

__all__ = ["ShardedBackend"]

# fairscale starts a reduction when its buffer has the last gradient, in each rank's own order. Ranks that use
# different parameters would then reduce different buffers together, or fail on buffers of different sizes.
# Here the reductions form a queue, the same on every rank, as in DDP: each starts when it and all before it
# are complete. A reduction that a backward leaves incomplete starts at the end of that backward.
#
# Only this section uses private names of ShardedDataParallel.


class Reduction:
    """A reduction to one owner: a buffer of fairscale, or a gradient too large for a buffer.

    Args:
        parameters: The parameters with the gradients to reduce.
        destination: Their owner.
        bucket: fairscale's buffer; None for a single gradient.
        in_half: True to reduce in float16.

    Attributes:
        missing: The parameters without a gradient in this backward yet.
        is_started: True if the reduction has begun.
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
        """Expect every gradient, when a backward begins."""
        self.missing = set(self.parameters)
        self.is_started = False

    def start(self) -> None:
        """Start the reduction; gradients that this rank has not computed are zero."""
        self.is_started = True
        self._sent = self._gradient().mul_(1.0 / dist.get_world_size())
        if self._in_half:
            self._sent = self._sent.half()
        self._work = dist.reduce(self._sent, self.destination, async_op=True)

    def _gradient(self) -> Tensor:
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
        """Wait for the reduction; afterwards only the owner has gradients."""
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
    """The reductions of a backward, in the order of their starts.

    Args:
        reductions: The reductions, in the order in which a backward usually completes them.
    """

    def __init__(self, reductions: Iterable[Reduction]) -> None:
        self._reductions = list(reductions)
        self._of = {p: reduction for reduction in self._reductions for p in reduction.parameters}
        self._waiting: deque[Reduction] = deque()
        self._is_open = False

    def begin(self) -> None:
        """Open the queue, when a backward begins."""
        self._is_open = True
        for reduction in self._reductions:
            reduction.expect()
        self._waiting = deque(self._reductions)

    def complete(self, parameter: nn.Parameter) -> None:
        """Note the gradient of a parameter, and start the reductions that are complete.

        Raises:
            UnsupportedError: The strategy did not run this backward, or it already reduces a gradient of the
                parameter.
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
        """Start the remaining reductions after a backward, and wait for all."""
        self._is_open = False
        while self._waiting:
            self._waiting.popleft().start()
        for reduction in self._reductions:
            reduction.wait()


class BufferedGradients(ShardedDataParallel):  # type: ignore[misc] # fairscale has no types
    """fairscale's buffers and hooks for the parameters of one dtype; its forward is not used.

    Args:
        module: The user's module.
        oss_list: The OSS of these parameters in each optimizer.
        complete: A function to call with each parameter that has its gradient.
        reduce_buffer_size: fairscale's option of this name.
        reduce_fp16: fairscale's option of this name.
    """

    def __init__(
        self,
        module: nn.Module,
        oss_list: Sequence[Any],
        complete: Callable[[nn.Parameter], None],
        *,
        reduce_buffer_size: int,
        reduce_fp16: bool,
    ) -> None:
        self._complete = complete
        super().__init__(
            module,
            list(oss_list),
            broadcast_buffers=False,
            sync_models_at_startup=False,
            reduce_buffer_size=reduce_buffer_size,
            reduce_fp16=reduce_fp16,
            auto_refresh_trainable=False,
        )

    @property
    def is_accumulating(self) -> bool:
        """True if gradients stay on this rank."""
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
        """Return a reduction for each buffer, and one for each parameter outside of the buffers."""
        found = [Reduction(bucket._params, bucket.destination, bucket=bucket) for bucket in self._bucket_list]
        inside = {parameter for reduction in found for parameter in reduction.parameters}
        for parameter, owner in self._trainable_param_to_rank.items():
            if parameter not in inside:
                found.append(Reduction([parameter], owner, in_half=self._reduce_fp16))
        return [reduction for reduction in found if reduction.parameters]

    @torch.no_grad()
    def attach(self) -> None:
        """Make gradients views of the buffers; gradients of None become zero."""
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
        """Remove the hooks."""
        while self._grad_hooks:
            self._grad_hooks.pop().remove()


def in_order_of_backward(
    reductions: Iterable[Reduction], order: Mapping[nn.Parameter, int]
) -> list[Reduction]:
    """Sort reductions for a backward that goes through the parameters from last to first."""
    return sorted(reductions, key=lambda reduction: -min(order.get(p, -1) for p in reduction.parameters))


# A buffer holds zeros for a parameter that no loss has used. An optimizer would decay the parameter and move
# it by its momentum. On a single device its gradient is None and it stays unchanged. So nnx records the
# parameters that a backward has used on some rank.


class UsedParameters:
    """A record of the parameters that got a gradient.

    Args:
        parameters: The parameters to watch; `watch` adds others.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._here: set[Tensor] = set()
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch more parameters, which must require gradients."""
        for parameter in parameters:
            if parameter not in self._handles and parameter.requires_grad:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._here.add
                )

    def anywhere(self, parameters: Sequence[nn.Parameter]) -> set[Tensor]:
        """Return the parameters that got a gradient on some rank since the last call. Collective."""
        flags = used_anywhere([parameter in self._here for parameter in parameters])
        self._here.clear()
        return {parameter for parameter, used in zip(parameters, flags, strict=True) if used}

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


T = TypeVar("T")


class _ShardedModule:
    """The gradients of one module's parameters, each reduced to the parameter's owner.

    Args:
        module: The user's module.
        oss_list: The OSS of each optimizer, grouped by dtype.
        complete: A function to call with each parameter that has its gradient.
        rank: This rank.
        options: The options of the strategy.
        device: The device of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        oss_list: Sequence[Sequence[Any]],
        *,
        complete: Callable[[nn.Parameter], None],
        rank: int,
        options: ShardedOptions,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._device = device
        self._owners: dict[nn.Parameter, int] = {}
        for oss in chain.from_iterable(oss_list):
            self._owners |= oss._param_to_rank
        self._parameters = list(self._owners)
        self._order = {parameter: index for index, parameter in enumerate(module.parameters())}
        self._buffers = [
            BufferedGradients(
                module,
                same,
                complete,
                reduce_buffer_size=options.reduce_buffer_size,
                reduce_fp16=options.reduce_fp16,
            )
            for same in oss_list
        ]
        self._trainable: list[bool] = []
        self._used = UsedParameters()
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._has_reduced = False
        self.is_published = False

    def refresh(self) -> bool:
        """Check for frozen or unfrozen parameters, and return True if `reductions` has changed."""
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        for buffers in self._buffers:
            buffers.refresh_trainable()
        self._used.watch(self._parameters)
        return True

    def reductions(self) -> list[Reduction]:
        """Return a backward's reductions, in the order in which it usually completes them."""
        found = chain.from_iterable(buffers.reductions() for buffers in self._buffers)
        return in_order_of_backward(found, self._order)

    @torch.no_grad()
    def prepare(self, *, synchronize: bool) -> None:
        """Make gradients views of the buffers again, before a backward."""
        if self._has_reduced:  # a present gradient is the average, and only its owner keeps it
            for parameter in self._parameters:
                if parameter.grad is not None and self._owners[parameter] == self._rank:
                    self._earlier[parameter] = parameter.grad.clone()
                parameter.grad = None
            self._has_reduced = self.is_published = False
        for buffers in self._buffers:
            buffers.attach()
            buffers.is_accumulating = not synchronize

    @torch.no_grad()
    def finish(self) -> None:
        """Add earlier reduced gradients after a reduction, and drop zeros of parameters that no rank used."""
        self._has_reduced = True
        used = self._used.anywhere(self._parameters)
        for parameter in self._parameters:
            earlier = self._earlier.pop(parameter, None)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
            elif parameter not in used:
                parameter.grad = None

    def continue_from(self, before: _ShardedModule) -> None:
        """Continue from gradients that another instance has reduced and published."""
        self._has_reduced, self.is_published = before._has_reduced, before.is_published

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast each owner's gradients to every rank. Collective."""
        if not self._has_reduced or self.is_published or not is_distributed():
            return
        self.is_published = True
        mine = [self._owners[p] == self._rank and p.grad is not None for p in self._parameters]
        shared: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter, has in zip(self._parameters, used_anywhere(mine), strict=True):
            if has:
                shared.setdefault((self._owners[parameter], parameter.dtype), []).append(parameter)
        for (owner, dtype), parameters in shared.items():
            if owner == self._rank:
                flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            else:
                size = sum(parameter.numel() for parameter in parameters)
                flat = torch.empty(size, dtype=dtype, device=self._device)
            dist.broadcast(flat, owner)
            gradients = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)

    @property
    def has_gradients(self) -> bool:
        """True if this rank has any gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def forget_earlier(self) -> None:
        """Drop gradients that were reduced before a failed backward."""
        self._earlier.clear()
        self._has_reduced = self.is_published = False

    def remove(self) -> None:
        """Remove the hooks."""
        for buffers in self._buffers:
            buffers.remove()
        self._used.remove()


class ShardedBackend(OwnedParameters):
    """Reduces each gradient to the parameter's owner, which updates the parameter."""

    Options = ShardedOptions
    options: ShardedOptions

    def __init__(self, options: ShardedOptions) -> None:
        super().__init__(options)
        self._sharded: dict[nn.Module, _ShardedModule] = {}
        self._oss_list: dict[nn.Module, list[Any]] = {}
        self._queue, self._is_stale = Queue(()), True
        self._synchronize, self._has_failed = True, False
        self._reductions = 0

    @property
    def reductions(self) -> int:
        """The number of reductions of gradients."""
        return self._reductions

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Assign parameters to owners, and reduce their gradients to the owners.

        Raises:
            UnsupportedError: No optimizer holds a parameter of the module.
        """
        refuse_no_optimizer(module, optimizers, engine="fairscale_sharded")
        super().setup_optimizers(module, optimizers)
        self._install_reductions(module)

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Publish the present gradients, and reduce later ones to the owners of new optimizers.

        Collective.
        """
        before = self._sharded[module]
        before.publish()
        super().exchange_optimizers(module, optimizers)
        self._sharded[module].continue_from(before)

    def _install_reductions(self, module: nn.Module) -> None:
        """Let fairscale's hooks reduce gradients to the present owners."""
        self._remove_reductions(module)
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for optimizer in self._optimizers[module]:
            for oss in self._owners[optimizer].oss_list:
                by_dtype.setdefault(oss.param_groups[0]["params"][0].dtype, []).append(oss)
        self._sharded[module] = _ShardedModule(
            module,
            list(by_dtype.values()),
            complete=self._complete,
            rank=self.context.rank,
            options=self.options,
            device=self.context.device,
        )
        self._sharded[module].refresh()  # its hooks refuse a backward that the strategy did not run
        self._oss_list[module] = [oss for same in by_dtype.values() for oss in same]

    def _remove_reductions(self, module: nn.Module) -> None:
        self._is_stale = True
        if sharded := self._sharded.pop(module, None):
            sharded.remove()

    def _complete(self, parameter: nn.Parameter) -> None:
        self._queue.complete(parameter)

    def _refresh_owners(self) -> None:
        """Assign parameters that were added to an optimizer."""
        for module, optimizers in self._optimizers.items():
            for optimizer in optimizers:
                self._owners[optimizer].refresh()
            oss_list = [oss for optimizer in optimizers for oss in self._owners[optimizer].oss_list]
            if {id(oss) for oss in oss_list} != {id(oss) for oss in self._oss_list[module]}:
                self._install_reductions(module)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Remove the reductions and the owners from the module."""
        self._remove_reductions(module)
        self._oss_list.pop(module, None)
        return super().unparallelize(module)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate gradients on this rank until the first backward outside of it."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients and reduce each to its owner; they add up until user code drops them."""
        if not any(self._optimizers.values()):
            raise no_optimizer("fairscale_sharded")
        self._refuse_after_failure()
        self._refresh_owners()
        every = list(self._sharded.values())
        has_changed = [sharded.refresh() for sharded in every]
        if self._is_stale or any(has_changed):
            self._is_stale = False
            self._queue = Queue(chain.from_iterable(sharded.reductions() for sharded in every))
        for sharded in every:
            sharded.prepare(synchronize=self._synchronize)
        if self._synchronize:
            self._queue.begin()
        self._has_failed = True
        with self._deferring_optimizers():
            super().backward(module, loss, *args, **kwargs)
        self._has_failed = False
        if not self._synchronize:
            return
        self._queue.finish()
        self._reductions += 1
        for sharded in every:
            sharded.finish()

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        self._refuse_after_failure()
        super()._refuse_unreduced(optimizer)

    def _refuse_after_failure(self) -> None:
        """Refuse gradients of a failed backward, of which only some are reduced."""
        if not self._has_failed:
            return
        if any(sharded.has_gradients for sharded in self._sharded.values()):
            raise UnsupportedError(
                "a backward ended with an error that was caught, and its gradients were not dropped: some of "
                "them are reduced and others are not.",
                remedy="Call `optimizer.zero_grad()` where you catch the error.",
            )
        self._has_failed = False
        for sharded in self._sharded.values():
            sharded.forget_earlier()

    def publish_gradients(self, module: nn.Module) -> None:
        """Broadcast each gradient from its owner."""
        for sharded in self._sharded.values():
            sharded.publish()

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return the reduced gradients of this rank's parameters, or all while they are published."""
        owners = self._owners.get(optimizer)
        if owners is None or any(sharded.is_published for sharded in self._sharded.values()):
            return super().gradients(optimizer)
        return [Gradient(p.grad, 1) for p in owners.parameters() if p.grad is not None and owners.owns(p)]
