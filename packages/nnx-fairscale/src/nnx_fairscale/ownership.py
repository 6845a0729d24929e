"""Who owns which parameter: fairscale's OSS around an optimizer that stays the user's.

OSS shares whole parameters out over the ranks, lays those of one owner out in one buffer, and broadcasts
that after each step. It also keeps an optimizer of its own for what a rank owns. Here the user's optimizer
is that one: it holds every parameter, and steps with the gradients of the owned ones, so only they get state,
and schedulers, hooks and callbacks see what they know. Private names of OSS are used here and in `sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from fairscale.optim import OSS
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.collective import is_distributed
from nnx_core.elementwise import dependence
from nnx_core.errors import UnsupportedError
from nnx_core.hidden_state import HiddenState

__all__ = ["Ownership"]

T = TypeVar("T")


class Ownership:
    """The owners of one optimizer's parameters.

    Args:
        optimizer: The user's; its parameters become views on their owners' buffers.
        rank: This rank.
        broadcast_fp16: Send updated parameters in float16.

    Raises:
        UnsupportedError: The optimizer needs all parameters in one place.
    """

    def __init__(self, optimizer: Optimizer, *, rank: int, broadcast_fp16: bool = False) -> None:
        if is_distributed() and dependence(optimizer) == "model":
            raise UnsupportedError(
                f"{type(optimizer).__name__} computes with all parameters at once, or by itself what is not "
                "known, so they cannot have different owners.",
                remedy="Use an optimizer that steps each parameter by itself (Adam, LAMB, Muon, ...), or "
                "strategy 'ddp'; for the norm of all gradients, use `gradient_clip_val`.",
            )
        self.optimizer = optimizer
        self._rank = rank
        self._broadcast_fp16 = broadcast_fp16
        self.parts: list[Any] = []
        self._share_out()
        self.state = HiddenState(optimizer, "each rank has that of the parameters that it owns")

    def _share_out(self) -> None:
        self._parameters = _parameters(self.optimizer)
        self._sizes = {parameter: parameter.numel() for parameter in self._parameters}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.numel():
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [self._make_part(same) for same in by_dtype.values()]
        self._owners = {p: rank for part in self.parts for p, rank in part._param_to_rank.items()}
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _make_part(self, parameters: list[nn.Parameter]) -> Any:
        """Fairscale's buffers hold one dtype, so each dtype has an OSS."""
        return OSS(
            [{"params": [parameter]} for parameter in parameters],
            optim=lambda groups, **_: self.optimizer,
            broadcast_fp16=self._broadcast_fp16,
        )

    def refresh(self) -> None:
        """Take notice of parameters that were added, frozen or unfrozen. New ones come with new `parts`."""
        if len(_parameters(self.optimizer)) != len(self._parameters):
            self._share_out()
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            for part in self.parts:
                part.refresh_trainable()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates the parameter; of one without elements every rank does."""
        return bool(self._owners.get(parameter, self._rank) == self._rank)

    def owner(self, parameter: nn.Parameter) -> int:
        """The rank that updates the parameter."""
        return int(self._owners.get(parameter, 0))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of the optimizer, in the order of its groups."""
        return self._parameters

    def step(self, check: Callable[[], None], step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Update what this rank owns, then give every rank all of it.

        Args:
            check: Called once the gradients are there, after the closure.
            step: The optimizer's own.
            args: The arguments for it.
            kwargs: The keyword arguments for it.
        """
        self.refresh()
        hidden: dict[nn.Parameter, Tensor] = {}

        def hide() -> None:
            check()
            for parameter in self._parameters:
                if parameter.grad is not None and not self.owns(parameter):
                    hidden[parameter] = parameter.grad
                    parameter.grad = None

        args, kwargs = _around_closure(self.state.hidden, hide, args, kwargs)
        try:
            with self.state.shown():
                result = step(*args, **kwargs)
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        with self._assigned_in_buffers():
            for part in self.parts:
                part._broadcast_params()
        return result

    @contextmanager
    def _assigned_in_buffers(self) -> Iterator[None]:
        """Around the broadcast of the buffers: parameters whose ``data`` was assigned are no views on them.

        They stay in the memory that they were given, which user code may hold as well.
        """
        apart: list[tuple[nn.Parameter, Any, int]] = []
        for bucket in _buckets(self.parts):
            begin = 0
            address, size = bucket.buffer.data_ptr(), bucket.buffer.element_size()
            for parameter in bucket._params:
                numel = self._sizes[parameter]
                if parameter.data_ptr() != address + begin * size or parameter.numel() != numel:
                    _check_assigned(parameter, numel, bucket.buffer)
                    apart.append((parameter, bucket, begin))
                begin += numel
        for parameter, bucket, begin in apart:
            _part(bucket, begin, parameter).copy_(parameter.detach())
        yield
        for parameter, bucket, begin in apart:
            parameter.data.copy_(_part(bucket, begin, parameter))

    def remove(self) -> None:
        """Give every parameter memory of its own again, and the optimizer its state."""
        self.state.remove()
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()


def _part(bucket: Any, begin: int, parameter: nn.Parameter) -> Tensor:
    part: Tensor = bucket.buffer[begin : begin + parameter.numel()]
    return part.view(parameter.shape)


def _check_assigned(parameter: nn.Parameter, numel: int, buffer: Tensor) -> None:
    if (parameter.numel(), parameter.dtype, parameter.device) != (numel, buffer.dtype, buffer.device):
        raise UnsupportedError(
            f"`data` with {parameter.numel()} elements of {parameter.dtype} on {parameter.device} was "
            f"assigned to a parameter that has {numel} of {buffer.dtype} on {buffer.device}.",
            remedy="Assign data of the same size and dtype, or change the parameter before training begins.",
        )


def _buckets(parts: Iterable[Any]) -> Iterator[Any]:
    """The buffers that parameters which are trained are views on."""
    for part in parts:
        for of_device in part.buckets.values():
            yield from of_device.values()


def _around_closure(
    around: Callable[[], AbstractContextManager[None]],
    then: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an optimizer's step that do something after the closure, or at once without one."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        then()
        return args, kwargs

    def closure_and_then() -> Any:
        with around():
            loss = closure()
        then()
        return loss

    return ((closure_and_then, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": closure_and_then})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]
