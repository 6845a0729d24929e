"""A `Part` for tensors whose values are not available yet, such as weights in an asynchronous step.

It keeps no copy and gathers nothing. The first torch function that needs values calls `wait`, which removes
this part from the tensor. Then the tensor answers by itself, or the earlier part does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nnx_core.view.guard import HeldByTensor, Part, guard, local_mode, part_of, unguard

__all__ = ["Pending", "guard_pending", "unguard_pending"]


class Pending(HeldByTensor, Part):
    """Waits for the values of a tensor on first use. Shape, gradient and hooks are available at once.

    Args:
        tensor: The tensor; this part does not keep it alive.
        wait: Returns once the tensor is available, and has called `unguard_pending` for it.
        behind: The part that answers afterwards; None if the tensor is unsharded.
    """

    def __init__(self, tensor: Tensor, wait: Callable[[], None], behind: Part | None) -> None:
        self.tensor, self.wait, self.behind = tensor, wait, behind

    @property
    def is_complete(self) -> bool:  # type: ignore[override] # a constant of other parts
        """True if no other part answers after this one."""
        return self.behind is None

    @property
    def is_copied_as_stored(self) -> bool:  # type: ignore[override] # a constant of other parts
        """True if it is True for the part that answers afterwards."""
        return self.behind is not None and self.behind.is_copied_as_stored

    def takes_behind(self, part: Part) -> bool:  # noqa: D102 # as the base says, here and below
        self.behind = part
        return True

    def _awaited(self) -> Tensor:
        tensor = self.tensor
        if part_of(tensor) is self:
            self.wait()
        return tensor

    @property
    def description(self) -> Tensor:  # noqa: D102
        if self.behind is not None:
            return self.behind.description
        with local_mode():
            return self.tensor.detach()

    def unsharded(self) -> Tensor:  # noqa: D102
        tensor = self._awaited()
        return tensor if self.behind is None else self.behind.unsharded()

    def value(self) -> Tensor:  # noqa: D102
        tensor = self._awaited()
        return tensor.detach() if self.behind is None else self.behind.value()

    def detached(self) -> Tensor:  # noqa: D102
        tensor = self._awaited()
        return tensor.detach() if self.behind is None else self.behind.detached()

    def differentiated(self) -> list[Tensor]:  # noqa: D102
        tensor = self._awaited()
        return [tensor] if self.behind is None else self.behind.differentiated()

    def attributes(self) -> dict[str, Any]:  # noqa: D102
        return super().attributes() if self.behind is None else self.behind.attributes()

    def flush(self) -> None:
        """Wait, because the caller is about to read this rank's shard."""
        self._awaited()
        if self.behind is not None:
            self.behind.flush()

    def randomized(self) -> None:  # noqa: D102
        if self.behind is not None:
            self.behind.randomized()

    def assign(self, values: Tensor) -> None:  # noqa: D102
        tensor = self._awaited()
        if self.behind is None:
            tensor.data = values
        else:
            self.behind.assign(values)

    def in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:  # noqa: D102
        self._awaited()
        if self.behind is not None and isinstance(args[0], (list, tuple)):
            return False  # others in the list may be pending, too
        func(*args, **kwargs)
        return True

    def gradient_shown(self) -> Tensor | None:  # noqa: D102
        if self.behind is not None:
            return self.behind.gradient_shown()
        with local_mode():
            return self.tensor.grad

    def gradient_given(self, gradient: Any) -> None:  # noqa: D102
        if self.behind is not None:
            self.behind.gradient_given(gradient)
            return
        with local_mode():
            self.tensor.grad = gradient

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:  # noqa: D102
        if self.behind is not None:
            return self.behind.hook(register, hook)
        with local_mode():
            return register(self.tensor, hook)


def guard_pending(tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
    """Make the next use of any of the tensors call `wait`; it replaces the wait of an earlier call.

    Args:
        tensors: The tensors, of any class, guarded or not.
        wait: Must call `unguard_pending` for all these tensors, and return once they are available.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> guard_pending([weight], lambda: (unguard_pending([weight]), print("waiting")))
        >>> weight.shape, weight.grad, float(weight.sum())
        waiting
        (torch.Size([2]), None, 2.0)
    """
    for tensor in tensors:
        known = part_of(tensor)
        if type(known) is Pending:  # faster than `isinstance` on an abstract class
            known.wait = wait
        else:
            guard(tensor, Pending(tensor, wait, known))


def unguard_pending(tensors: Iterable[Tensor]) -> None:
    """Remove the wait: restore the class of the tensors, or the part behind."""
    for tensor in tensors:
        known = part_of(tensor)
        if type(known) is not Pending:
            continue
        unguard(tensor)
        if known.behind is not None:
            guard(tensor, known.behind)
