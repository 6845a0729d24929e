"""Refuse to continue with gradients of a failed backward, after user code caught its error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from nnx_core.errors import UnsupportedError

__all__ = ["FailedBackward"]


class FailedBackward:
    """Records a failed backward until every optimizer's `zero_grad` is called.

    In one process `p.grad` then holds partial gradients of the failed batch, added to accumulated ones. An
    engine that shards or reduces gradients cannot keep that sum: it reduced some of them before the error.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer, failed = torch.optim.SGD([weight]), FailedBackward()
        >>> failed.watch(optimizer)
        >>> try:
        ...     with failed.remembering():
        ...         raise RuntimeError("out of memory")
        ... except RuntimeError:
        ...     optimizer.zero_grad()
        >>> failed.refuse()
    """

    def __init__(self) -> None:
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._not_zeroed: WeakSet[Optimizer] = WeakSet()

    def watch(self, optimizer: Any, wrapper: Any = None) -> None:
        """Wrap an optimizer's `zero_grad` to clear the record.

        Args:
            optimizer: The user's optimizer.
            wrapper: The wrapper whose `zero_grad` user code calls, such as a `LightningOptimizer`.
        """
        called = optimizer if wrapper is None else wrapper
        zero_grad = called.zero_grad
        if getattr(zero_grad, "nnx_failed_backward", None) is self:
            return
        self._optimizers.add(optimizer)

        @wraps(zero_grad)
        def zero(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            self._not_zeroed.discard(optimizer)

        zero.nnx_failed_backward = self  # type: ignore[attr-defined]
        called.zero_grad = zero

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Record a failure of a backward, in a context."""
        try:
            yield
        except BaseException:
            self._not_zeroed.update(self._optimizers)
            raise

    def refuse(self) -> None:
        """Refuse a backward or a step on gradients of a failed backward.

        Raises:
            UnsupportedError: An optimizer's `zero_grad` was not called since the failure.
        """
        if self._not_zeroed:
            raise UnsupportedError(
                "a backward ended with an error that was caught, and gradients of its batch and of those "
                "accumulated before are not dropped: some layers have them and others have not.",
                remedy="Call `zero_grad()` of every optimizer where you catch the error.",
            )
