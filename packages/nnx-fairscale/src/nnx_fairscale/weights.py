"""Show user code the parameters in units as unsharded, with their gradients, and copy writes into the shards.

Between steps, the data of a parameter is this rank's shard. Code for one process expects all elements, so
each parameter is guarded (`nnx_core.view.guard`): the guard gathers the tensor when user code reads values,
and copies changes back. In a forward the modules hold views of the unit's gathered parameters, which need no
guard.

`Weights` holds all guarded parameters of a backend. It frees gathered tensors before the engine uses shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_base.box import cut_range
from nnx_core._torch_compat import current_backward, storage_users
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import Writes
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import (
    HeldByTensor,
    Part,
    guard,
    guarded_mode,
    local_mode,
    part_of,
    unguard,
)
from nnx_core.view.guarded_parameters import GuardedParameters, Snapshot
from nnx_fairscale._fairscale_fsdp import Piece, Unit


class _PiecePart(Part):
    """The part of a tensor with the layout of a parameter: of the parameter or of its gradient.

    Args:
        tensor: The elements of this rank.
        piece: The parameter.
        unit: The unit of the parameter.
        weights: The object that decides how long gathered tensors are kept.
        name: The name for messages.
    """

    def __init__(self, tensor: Tensor, piece: Piece, unit: Unit, weights: Weights, name: str) -> None:
        self.tensor = tensor
        self.piece, self.unit, self.name = piece, unit, name
        self._weights = weights
        self._value: Tensor | None = None
        self._seen: Snapshot | None = None
        self._sum: Tensor | None = None
        self._users = 0

    @property
    def description(self) -> Tensor:
        return torch.empty(self.piece.shape, dtype=self.tensor.dtype, device="meta")

    def unsharded(self) -> Tensor:
        return self.value()

    def value(self) -> Tensor:
        with local_mode(), torch.inference_mode(False), torch.no_grad():
            self.flush()
            if self._value is None:
                self._weights.before_gather(self)
                self._value = self._gather()
                self._seen, self._users = Snapshot(self._value), storage_users(self._value)
                self._sum = self._sum_of(self._value)
                self._weights.keep(self)
            return self._value.detach()  # a view: `is_viewed` counts the users of its storage

    def _gather(self) -> Tensor:
        own, unit, piece = self.tensor.detach()[: self.piece.length], self.unit, self.piece
        if unit.world_size == 1:
            return own.view(piece.shape)
        size = unit.shard_size
        numel = piece.shape.numel()
        cuts = [
            cut_range(piece.begin, numel, low=r * size, high=(r + 1) * size) for r in range(unit.world_size)
        ]
        longest = max(length for _, length in cuts)
        sent = torch.zeros(longest, dtype=own.dtype, device=unit.compute_device)
        sent[: piece.length].copy_(own)
        found = sent.new_empty(unit.world_size * longest)
        dist.all_gather_into_tensor(found, sent, group=unit.process_group)
        parts = [found[rank * longest :][:length] for rank, (_, length) in enumerate(cuts)]
        return torch.cat(parts).view(piece.shape).to(own.device)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's elements of a tensor of the logical shape."""
        return whole.reshape(-1)[self.piece.start : self.piece.start + self.piece.length]

    def flush(self) -> None:
        value = self._value
        if value is None or self._seen is None or self.is_gone:
            return
        with local_mode(), torch.no_grad():
            if self._seen.is_changed(value):
                self._note(value, self._sum)
                self.tensor[: self.piece.length].copy_(self.own(value))
                self._seen, self._sum = Snapshot(value), self._sum_of(value)

    def _sum_of(self, whole: Tensor) -> Tensor | None:
        """Return a checksum if the ranks compare writes."""
        return None

    def _note(self, whole: Tensor, before: Tensor | int | None) -> None:
        """Note that user code has changed the tensor with checksum `before`."""

    def forget(self) -> None:
        """Copy changes back, and free the gathered tensor."""
        self.flush()
        self._value = self._seen = None

    @property
    def is_viewed(self) -> bool:
        """True if anything but this part holds the memory of the gathered tensor, and may write into it."""
        return self._value is not None and storage_users(self._value) > self._users

    def assign(self, values: Tensor) -> None:
        held = part_of(values)
        value = values if held is None else held.value()
        if value.shape != self.piece.shape or value.dtype != self.tensor.dtype:
            raise UnsupportedError(
                f"{self.name!r}, a sharded {self.tensor.dtype} tensor of shape {tuple(self.piece.shape)}, "
                f"is given data of shape {tuple(value.shape)} and {value.dtype}.",
                remedy="Give it data of the same shape and dtype, or change it before training.",
            )
        with local_mode(), torch.no_grad():
            self._value = None
            self._note(value, 0)
            self.tensor[: self.piece.length].copy_(self.own(value.detach()))

    def randomized(self) -> None:
        if self._value is not None and self.unit.world_size > 1:
            with local_mode(), torch.no_grad():
                drawn = self._value.detach().to(self.unit.compute_device)
                dist.broadcast(drawn, 0, group=self.unit.process_group)
                self._value.copy_(drawn)

    def gradient_shown(self) -> Tensor | None:
        return None

    def gradient_given(self, gradient: Any) -> None:
        """Ignore it, because a gradient has no gradient."""

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        with local_mode():
            return register(self.tensor, hook)


class _GradientPart(HeldByTensor, _PiecePart):
    """The part of a gradient. While gradients accumulate unreduced, this rank has its own complete one."""

    def value(self) -> Tensor:
        unreduced = self.unit.unreduced_gradient(self.piece)
        return super().value() if unreduced is None else unreduced


class _ParameterPart(_PiecePart):
    """The part of a parameter."""

    def __init__(self, piece: Piece, unit: Unit, weights: Weights, name: str) -> None:
        super().__init__(piece.parameter, piece, unit, weights, name)
        self._leaf: Tensor | None = None
        self._assigned: Tensor | None = None
        self._shown: tuple[Tensor, Tensor] | None = None

    def unsharded(self) -> Tensor:
        wants_gradient = torch.is_grad_enabled() and self.tensor.requires_grad
        # In backward a checkpoint may read it again and save it, and fairscale frees the unit meanwhile.
        in_forward = self.unit.is_shown and current_backward() < 0
        if wants_gradient and self.piece.shown is not None and in_forward:
            return self.piece.shown
        value = self.value()
        if not wants_gradient:
            return value
        if self._leaf is None or self._leaf.data_ptr() != value.data_ptr():
            with local_mode():
                self._leaf = value.detach().requires_grad_()
            self._weights.add_leaf(self, self._leaf)
        return self._leaf

    def differentiated(self) -> list[Tensor]:
        view = self.unit.view_of(self.piece)
        return [tensor for tensor in (view, self._leaf) if tensor is not None]

    def _sum_of(self, whole: Tensor) -> Tensor | None:
        return self._weights.writes.sum_of(whole)

    def _note(self, whole: Tensor, before: Tensor | int | None) -> None:
        self._weights.writes.add(self.piece.parameter, whole, before)

    def drop_leaf(self) -> None:
        """Gather again for the next loss; a loss that depends on what was gathered keeps it."""
        self._leaf = None

    def gradient_shown(self) -> Tensor | None:
        with local_mode():
            gradient = self.tensor.grad
            if gradient is None:
                self._shown = None
                return None
            if self._shown is None or self._shown[0] is not gradient:
                shown = gradient.detach()
                part = _GradientPart(
                    shown, self.piece, self.unit, self._weights, f"the gradient of {self.name}"
                )
                guard(shown, part)
                self._shown = gradient, shown
            return self._shown[1]

    def gradient_given(self, gradient: Any) -> None:
        if self._shown is not None and gradient is self._shown[1]:
            return
        held = part_of(gradient)
        value = gradient if held is None else held.value()
        with local_mode(), torch.no_grad():
            self._shown = None
            if not isinstance(value, Tensor):
                self.tensor.grad = value
                return
            if value.shape != self.piece.shape:
                raise RuntimeError(
                    f"a gradient of shape {tuple(value.shape)} is given to a parameter of shape "
                    f"{tuple(self.piece.shape)}."
                )
            value = value.detach().to_dense() if value.is_sparse else value.detach()
            unreduced = self.unit.unreduced_gradient(self.piece)
            if unreduced is not None:
                unreduced.copy_(value)
            self.tensor.grad = torch.zeros_like(self.tensor)
            self.tensor.grad[: self.piece.length].copy_(self.own(value))

    def assign(self, values: Tensor) -> None:
        """Copy the values; remember them for a trained parameter, which must not share them."""
        super().assign(values)
        with local_mode():
            if self.tensor.requires_grad and part_of(values) is None:
                self._assigned = values.detach()
                self._weights.watch_assigned(self)

    def take_assigned(self) -> Tensor | None:
        """Return the tensor that user code assigned to ``data`` since the last call."""
        assigned, self._assigned = self._assigned, None
        return assigned

    @torch.no_grad()
    def add_mean_gradient(self, gradient: Tensor | None) -> None:
        """Add this rank's shard of the mean of the ranks' gradients. Collective.

        Args:
            gradient: The gradient of the gathered parameter on this rank; None if only other ranks have one.
        """
        unit = self.unit
        if gradient is None:
            gradient = torch.zeros(self.piece.shape, dtype=self.tensor.dtype)
        mean = gradient.to(unit.compute_device, copy=True).contiguous()
        if unit.world_size > 1:
            dist.all_reduce(mean, group=unit.process_group)
            mean.div_(unit.world_size)
        if self.tensor.grad is None:
            self.tensor.grad = torch.zeros_like(self.tensor)
        self.tensor.grad[: self.piece.length].add_(self.own(mean).to(self.tensor.device))

    def call_hooks(self) -> None:
        """Call the hooks for an accumulated gradient."""
        hooks = getattr(self.tensor, "_post_accumulate_grad_hooks", None) or {}
        if self.tensor.grad is not None:
            for hook in list(hooks.values()):
                with guarded_mode():
                    hook(self.tensor)


class Weights(GuardedParameters[_PiecePart, _ParameterPart]):
    """All parameters in units of one backend, in user code's view.

    Args:
        order: The order of collectives; it notices a tensor that only some ranks read.
        writes: The checksums of user code's writes.
    """

    _order: CollectiveOrder

    def __init__(self, order: CollectiveOrder, writes: Writes) -> None:
        super().__init__(order)
        self.writes = writes
        self._assigned: list[_ParameterPart] = []

    def show(self, units: Iterable[Unit], names: Mapping[nn.Parameter, str]) -> None:
        """Guard the parameters of units."""
        for unit in units:
            for piece in unit.pieces:
                name = names.get(piece.parameter, "a parameter")
                part = self._parts[piece.parameter] = _ParameterPart(piece, unit, self, name)
                guard(piece.parameter, part)

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore the class of parameters."""
        self.flush()
        for parameter in parameters:
            part = self._parts.pop(parameter, None)
            if part is not None:
                self._differentiated.discard(part)
                unguard(parameter)

    def before_gather(self, part: _PiecePart) -> None:
        """Check that all ranks gather the same parameter."""
        self._order.arrive(f"the gather of {part.name}, which code outside of its layer reads")

    def watch_assigned(self, part: _ParameterPart) -> None:
        """Remember a parameter whose ``data`` user code has set."""
        self._assigned.append(part)

    def refuse_shared_data(self) -> None:
        """Refuse ``data`` that shares memory: in one process a step would change the other tensor too."""
        parts, self._assigned = self._assigned, []
        given = {part.name: tensor for part in parts if (tensor := part.take_assigned()) is not None}
        # Tensors that user code has dropped have no other users than `given`. `alone` measures how many users
        # a storage has that only one name holds.
        ours = Counter(tensor.untyped_storage().data_ptr() for tensor in given.values())
        alone = storage_users(torch.empty(1)) - 1
        for name, tensor in given.items():
            if storage_users(tensor) > alone + ours[tensor.untyped_storage().data_ptr()]:
                raise UnsupportedError(
                    f"{name!r} was given `data` that another tensor shares. In one process the optimizer's "
                    "step would change both, and here it cannot.",
                    remedy="Assign a copy: `parameter.data = tensor.clone()`. For ModelPruning, pass "
                    "`use_lottery_ticket_hypothesis=False`.",
                )

    def settle(self) -> None:
        """Complete the gradients, unless they accumulate unreduced: the last backward adds these together."""
        if all(part.unit.unreduced_gradient(part.piece) is None for part in self._own_gradients):
            super().settle()

    @property
    def has_hooks(self) -> bool:
        """True if hooks read accumulated gradients, which backward must then reduce."""
        with local_mode():
            return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parts)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Average the gradients of gathered reads, and add them to the units' gradients. Collective."""
        with local_mode():
            self._add_own_gradients()
            for part in self._parts.values():
                part.call_hooks()
