"""The guarded parameters of a module: the lifetime of gathered tensors, and the contexts of local shards.

`GuardedParameters` keeps the tensor that was gathered last, collects the gradients of losses that depend on
gathered tensors, and removes the guards during an optimizer's step. `Snapshot` and `AssignedData` detect
writes of user code into gathered tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from nnx_base.clean_up import clean_up
from nnx_core._torch_compat import guarded_mode, users_of_storage
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.optimizers.gradients import refuse_sparse_gradient
from nnx_core.view.guard import local_mode, show_plain, show_unsharded

__all__ = ["AssignedData", "Gathered", "GuardedParameter", "GuardedParameters", "Snapshot"]


class Gathered(Protocol):
    """A `Part` that holds its gathered tensor."""

    @property
    def is_viewed(self) -> bool:
        """True if user code has a view of the gathered tensor, and may write into it."""
        ...

    def forget(self) -> None:
        """Write back changes, and free the gathered tensor."""


class GuardedParameter(Protocol):
    """The `Part` of a parameter.

    Attributes:
        name: The parameter's name, for errors.
    """

    name: str

    def add_mean_gradient(self, gradient: Tensor | None) -> None:
        """Add the mean over the ranks to the gradient. Collective.

        Args:
            gradient: This rank's gradient of the gathered parameter; None if only other ranks have one.
        """

    def drop_leaf(self) -> None:
        """Gather again for the next loss; a loss that depends on what was gathered keeps it."""


_COMPLETION = "the completion of gradients after a backward that the strategy did not run"

G = TypeVar("G", bound=Gathered)
P = TypeVar("P", bound=GuardedParameter)


class GuardedParameters(Generic[G, P]):
    """All guarded parameters of one module; a view of `nnx_core.parts_backend.PartsBackend`.

    The tensor that was gathered last stays in memory, and so do gathered tensors that user code has views of.

    Args:
        order: The order that the ranks agree on; None does not compare the ranks.
    """

    def __init__(self, order: CollectiveOrder | None = None) -> None:
        self._order = order
        self._parts: dict[nn.Parameter, P] = {}
        self._gathered: list[G] = []
        # Both outlive a step: a loss may depend on a tensor that was gathered before the step began.
        self._differentiated: set[P] = set()
        self._own_gradients: dict[P, Tensor] = {}
        self._in_backward = False

    def keep(self, part: G) -> None:
        """Keep a gathered tensor, and free the others (except those that user code has views of)."""
        viewed = [kept for kept in self._gathered if kept is not part and kept.is_viewed]
        for kept in self._gathered:
            if kept is not part and kept not in viewed:
                kept.forget()
        self._gathered = [*viewed, part]

    def is_last(self, part: G) -> bool:
        """Return True if a part was gathered last, on every rank; views may differ between ranks."""
        return bool(self._gathered) and self._gathered[-1] is part

    def flush(self) -> None:
        """Write back changes to gathered tensors, and free them."""
        parts, self._gathered = self._gathered, []
        for part in parts:
            part.forget()

    def begin_step(self) -> None:
        """Free what was gathered; losses that depend on it keep it."""
        self.flush()
        for part in self._differentiated:
            part.drop_leaf()

    def add_leaf(self, part: P, leaf: Tensor) -> None:
        """Collect the gradients of a gathered tensor that a loss may depend on."""
        self._differentiated.add(part)

        def collect(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            known = self._own_gradients.get(part)
            if gradient is not None:
                refuse_sparse_gradient(gradient, part.name)
                self._own_gradients[part] = gradient if known is None else known + gradient

        leaf.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Complete the gradients after a backward that did not go through the strategy. Collective."""
        if self._in_backward or not self._own_gradients:
            return
        if self._order is not None:  # a rank whose loss reads no weight has nothing to complete
            names = ", ".join(sorted(part.name for part in self._own_gradients)[:2])
            cause = f" (its loss uses {names}; `manual_backward` or `fabric.backward` completes all ranks')"
            self._order.arrive(_COMPLETION, cause=cause)
        self._add_own_gradients()

    def _add_own_gradients(self) -> None:
        """Add the mean gradient of each gathered tensor that has one on some rank. Collective."""
        parts = [part for part in self._parts.values() if part in self._differentiated]
        if not parts:
            return
        own, self._own_gradients = self._own_gradients, {}
        for part, is_wanted in zip(parts, used_anywhere([part in own for part in parts]), strict=True):
            if is_wanted:
                part.add_mean_gradient(own.get(part))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show local shards on this thread: for an optimizer's step and the engine's own work."""
        self._show_plain()
        try:
            with local_mode():
                yield
        finally:
            self._show_unsharded()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Show unsharded parameters again, within `stepping`: for a closure."""
        self._show_unsharded()
        with clean_up("collecting gradients after a closure", self._show_plain), guarded_mode():
            yield

    def _show_plain(self) -> None:
        self.settle()
        self.flush()
        for parameter in self._parts:
            show_plain(parameter)

    def _show_unsharded(self) -> None:
        for parameter in self._parts:
            show_unsharded(parameter)


class Snapshot:
    """The values of a gathered tensor when it was last equal to the shards.

    Writes through numpy do not change a tensor's version counter. They need CPU memory, so the values of CPU
    tensors are compared, too.

    Args:
        value: The gathered tensor.
    """

    def __init__(self, value: Tensor) -> None:
        self._version = value._version
        self._values = value.detach().clone() if value.device.type == "cpu" else None

    def is_changed(self, value: Tensor) -> bool:
        """Return True if user code has written into the tensor since then."""
        if value._version != self._version:
            return True
        return self._values is not None and not torch.equal(value, self._values)


class AssignedData:
    """The tensor that user code assigned to ``data``; an unsharded parameter would share its memory.

    A second assignment of the same tensor then changes nothing, because the tensor has the parameter's
    trained values, unless user code has written into it. Lightning's ``ModelPruning`` assigns so after every
    epoch.

    Args:
        assigned: The assigned tensor.
        own: This rank's elements of it.
    """

    def __init__(self, assigned: Tensor, own: Tensor) -> None:
        self._storage = assigned.untyped_storage()
        self._values = own.clone()

    def is_still(self, assigned: Tensor, own: Tensor) -> bool:
        """Return True if this is the same memory, with the same values."""
        same = assigned.untyped_storage().data_ptr() == self._storage.data_ptr()
        return same and torch.equal(own, self._values)

    @property
    def is_shared(self) -> bool:
        """True if another tensor holds the memory."""
        return users_of_storage(self._storage) > 1
