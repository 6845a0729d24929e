"""fairscale's ShardedDataParallel behind ``fairscale_sharded``, made correct on torch 2 and later.

It reduces each gradient to the rank that owns the parameter, in buffers that ``param.grad`` must be a view
on. Since torch 2.0 ``zero_grad`` sets gradients to None; the next backward then makes new ones beside the
buffers, and from the second step on every rank trains alone, silently. `_ShardedModule.prepare` makes
gradients views again before each backward. Private names of ShardedDataParallel are used in this file only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.gradients import Gradient
from nnx_fairscale.options import ShardedOptions
from nnx_fairscale.oss import OwnedParameters
from nnx_fairscale.touched import Touched

__all__ = ["ShardedBackend"]

T = TypeVar("T")


class _ShardedModule:
    """fairscale's wrapper beside a module: only its buffers and hooks are used, its forward is not.

    Args:
        module: The user's.
        parts: The OSS of parameters of one dtype, of each optimizer: fairscale's buffers hold one dtype.
        rank: This rank.
        options: Of the strategy.
        device: Of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Any],
        *,
        rank: int,
        options: ShardedOptions,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._device = device
        self._owners: dict[nn.Parameter, int] = {}
        for part in parts:
            self._owners |= part._param_to_rank
        self._parameters = list(self._owners)
        self._wrapper = ShardedDataParallel(
            module,
            list(parts),
            broadcast_buffers=False,
            sync_models_at_startup=False,
            reduce_buffer_size=options.reduce_buffer_size,
            reduce_fp16=options.reduce_fp16,
            auto_refresh_trainable=False,
        )
        self._trainable: list[bool] = []
        self._touched = Touched()
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._has_reduced = False

    @torch.no_grad()
    def prepare(self, *, synchronize: bool) -> None:
        """Before a backward: notice what was frozen, and make gradients views on the buffers again."""
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            with torch.enable_grad():  # it finds where hooks go through the graph of a tiny operation
                self._wrapper.refresh_trainable()
            self._touched.watch(self._parameters)
        if (
            self._has_reduced
        ):  # what is there is the owners' average, and nothing that means anything elsewhere
            for parameter in self._parameters:
                if parameter.grad is not None:
                    if self._owners[parameter] == self._rank:
                        self._earlier[parameter] = parameter.grad.clone()
                    parameter.grad.zero_()
            self._has_reduced = False
        self._attach()
        self._wrapper._should_accumulate_grads = not synchronize
        self._wrapper._clear_counters()

    def _attach(self) -> None:
        for bucket in self._wrapper._bucket_list:
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

    @torch.no_grad()
    def finish(self, *, synchronize: bool) -> None:
        """After a backward: add to what was reduced before, and drop zeros of what no rank has used."""
        if not synchronize:
            return
        self._has_reduced = True
        used = self._touched.anywhere(self._parameters, self._device)
        for bucket in self._wrapper._bucket_list:
            if bucket.destination != self._rank:  # fairscale's own `collapse` fails on views
                bucket.buffer = bucket.buffer.new_empty(0)
                for parameter in bucket._params:
                    parameter.grad = None
        for parameter in self._parameters:
            earlier = self._earlier.pop(parameter, None)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
            elif parameter not in used:
                parameter.grad = None

    def remove(self) -> None:
        """Take the hooks off."""
        while self._wrapper._grad_hooks:
            self._wrapper._grad_hooks.pop().remove()
        self._touched.remove()


class ShardedBackend(OwnedParameters):
    """Reduces each gradient to the rank that owns the parameter, which updates it."""

    Options = ShardedOptions
    options: ShardedOptions

    def __init__(self, options: ShardedOptions) -> None:
        super().__init__(options)
        self._sharded: dict[nn.Module, list[_ShardedModule]] = {}
        self._parts: dict[nn.Module, list[Any]] = {}
        self._synchronize = True

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Share the parameters out, and reduce their gradients to their owners."""
        super().setup_optimizers(module, optimizers)
        self._reduce_to_owners(module)

    def _reduce_to_owners(self, module: nn.Module) -> None:
        """Let fairscale's hooks reduce gradients to the owners that there are now."""
        self._stop_reducing(module)
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for optimizer in self._optimizers[module]:
            for part in self._owners[optimizer].parts:
                by_dtype.setdefault(part.param_groups[0]["params"][0].dtype, []).append(part)
        self._sharded[module] = [
            _ShardedModule(
                module, same, rank=self.context.rank, options=self.options, device=self.context.device
            )
            for same in by_dtype.values()
        ]
        self._parts[module] = [part for same in by_dtype.values() for part in same]

    def _stop_reducing(self, module: nn.Module) -> None:
        for sharded in self._sharded.pop(module, ()):
            sharded.remove()

    def _follow_optimizers(self) -> None:
        """Notice parameters that were added to an optimizer since."""
        for module, optimizers in self._optimizers.items():
            for optimizer in optimizers:
                self._owners[optimizer].refresh()
            parts = [part for optimizer in optimizers for part in self._owners[optimizer].parts]
            if {id(part) for part in parts} != {id(part) for part in self._parts[module]}:
                self._reduce_to_owners(module)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Take it all off the module."""
        self._stop_reducing(module)
        self._parts.pop(module, None)
        return super().unparallelize(module)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Keep gradients on this rank until the first backward outside of it."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, each reduced to its owner; they add up until they are dropped."""
        self._follow_optimizers()
        every = [sharded for several in self._sharded.values() for sharded in several]
        for sharded in every:
            sharded.prepare(synchronize=self._synchronize)
        super().backward(module, loss, *args, **kwargs)
        for sharded in every:
            sharded.finish(synchronize=self._synchronize)

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """The reduced gradients of what this rank owns; no other rank has them."""
        owners = self._owners.get(optimizer)
        if owners is None:
            return super().gradients(optimizer)
        return [Gradient(p.grad, 1) for p in owners.parameters() if p.grad is not None and owners.owns(p)]
