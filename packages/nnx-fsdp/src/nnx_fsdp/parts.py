"""Gather one sharded tensor for user code, and copy writes back: a parameter, its data, its gradient.

The guard (`nnx_core.view.guard`) asks a part for the unsharded tensor. The part gathers it from the DTensor,
and copies changes back into the shards. `weights` holds all parts of a module and frees the gathered tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from nnx_base.shard import shard_of
from nnx_core._torch_compat import storage_users
from nnx_core.agree.divergence import checksum, digest, refuse_unequal_gradient
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import Guard, HeldByTensor, Part, guard, local_mode, part_of, unguard
from nnx_core.view.guarded_parameters import AssignedData, Snapshot
from nnx_core.view.torch_functions import is_elementwise_in_place
from nnx_fsdp._torch_compat import HeldParameter

__all__ = ["ParameterPart", "ShardedPart", "gather"]


class Keeper(Protocol):
    """Decides how long gathered tensors are kept."""

    def before_gather(self, part: ShardedPart) -> None:
        """Called before all ranks gather a part."""

    def is_last(self, part: ShardedPart) -> bool:
        """Return True if the part was gathered last; the answer must be the same on all ranks."""

    def keep(self, part: ShardedPart) -> None:
        """Called after a part was gathered."""

    def add_assigned(self, part: ShardedPart) -> None:
        """Called after user code has set the ``data`` of a tensor."""

    @property
    def is_watched(self) -> bool:
        """True if the ranks compare writes to parameters."""

    def note_written(self, part: ShardedPart, written: Tensor | int) -> None:
        """Called after a write to a parameter, with a checksum that must be the same on every rank."""

    def add_leaf(self, part: ParameterPart, leaf: Tensor) -> None:
        """Called when a loss may begin to depend on a gathered parameter."""

    def settle(self) -> None:
        """Complete the gradients of the last backward, before user code reads them."""


class ShardedPart(Part):
    """The part of a DTensor: gathers it, and copies changes back.

    Args:
        tensor: A DTensor whose placements are `Shard` and `Replicate` only.
        keeper: The object that decides how long the gathered tensor is kept.
        name: The name for messages.
    """

    def __init__(self, tensor: Tensor, keeper: Keeper, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self._keeper = keeper
        self._value: Tensor | None = None
        self._made_of: tuple[int, int] = (0, 0)
        self._seen: Snapshot | None = None
        self._sum: Tensor | None = None
        self._users = 0
        self._slices: tuple[slice, ...] | None = None
        self._aliases: list[weakref.ref[AliasPart]] = []
        self._source: AssignedData | None = None

    @property
    def dtensor(self) -> DTensor:
        """The tensor, typed as a DTensor."""
        return cast(DTensor, self.tensor)

    @property
    def local(self) -> Tensor:
        """The local shard."""
        return self.dtensor._local_tensor

    @property
    def description(self) -> Tensor:  # noqa: D102 # the base class has the docstring
        with local_mode():
            tensor = self.tensor
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def unsharded(self) -> Tensor:  # noqa: D102
        return self.value()

    def value(self) -> Tensor:  # noqa: D102
        with local_mode():
            self.flush()
            if self._value is None or not self._keeper.is_last(self) or self._made_of != self._local_state():
                self._gather()
            return cast(Tensor, self._value).detach()  # a view: `is_viewed` counts the users of its storage

    def _gather(self) -> None:
        """Gather the tensor, into the memory that user code already views if there is any."""
        self._keeper.before_gather(self)
        with torch.inference_mode(False), torch.no_grad():
            value = gather(self.dtensor)
            # User code's views must see the new values, so the gather copies into their memory. A loss that
            # depends on the old values must not see them: then a new tensor takes the place of the old one.
            if not self.is_viewed or (self._is_differentiated and self._made_of != self._local_state()):
                self._value, self._users = value, storage_users(value)
            elif self._made_of != self._local_state():
                cast(Tensor, self._value).copy_(value)
        self._made_of, self._seen = self._local_state(), Snapshot(cast(Tensor, self._value))
        self._sum = checksum(cast(Tensor, self._value)) if self._is_compared else None
        self._keeper.keep(self)

    def detached(self) -> Tensor:
        """Return a guarded DTensor that shares memory; nothing is gathered before user code reads values."""
        with local_mode():
            self.flush()
            alias = self.tensor.detach()
        part = AliasPart(alias, self)
        self._aliases = [ref for ref in self._aliases if ref() is not None]
        self._aliases.append(weakref.ref(part))
        guard(alias, part)
        return alias

    def own(self, whole: Tensor) -> Tensor:
        """Return the view of the local shard in a plain tensor of the logical shape."""
        if self._slices is None:
            boxes = shard_of(self.tensor).boxes
            self._slices = boxes[0].slices if boxes else (slice(0, 0),)
        return whole[self._slices] if self.local.ndim else whole

    def flush(self) -> None:  # noqa: D102
        value = self._value
        if value is None or self._seen is None or self.is_gone:
            return
        with local_mode(), torch.no_grad():
            if self._seen.is_changed(value):
                # Every rank has made the same change to its gathered tensor, so each copies its own shard.
                if self._sum is not None:
                    before, self._sum = self._sum, checksum(value)
                    self._keeper.note_written(self, self._sum - before)
                self.local.copy_(self.own(value))
                self._made_of, self._seen = self._local_state(), Snapshot(value)

    def randomized(self) -> None:
        """Broadcast rank zero's random values to the gathered tensor of every rank."""
        if self._value is not None and dist.is_initialized() and dist.get_world_size() > 1:
            with torch.no_grad():
                values = self._value.detach().to(self.dtensor.device_mesh.device_type)
                dist.broadcast(values, src=0)
                self._value.copy_(values)

    def in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Run an elementwise function on the local shards only; return False if it needs other elements."""
        if not is_elementwise_in_place(func):
            return False
        first = args[0]
        try:
            if isinstance(first, (list, tuple)):
                parts = [tensor._part for tensor in first]
                own_args = [_own_lists(argument, parts) for argument in args]
                own_kwargs = {name: _own_lists(argument, parts) for name, argument in kwargs.items()}
            else:
                parts = [self]
                own_args = [_own(argument, self) for argument in args]
                own_kwargs = {name: _own(argument, self) for name, argument in kwargs.items()}
        except _NotHereError:
            return False
        for part in parts:
            part.flush()
        with local_mode(), torch.no_grad():
            if self._is_compared:
                self._keeper.note_written(self, _sum_of([func.__name__, *args[1:], *kwargs.values()]))
            func(*own_args, **own_kwargs)
        return True

    def assign(self, values: Tensor) -> None:  # noqa: D102
        tensor = self.tensor
        with local_mode():
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                raise UnsupportedError(
                    f"{self.name!r}, a sharded {tensor.dtype} tensor of shape {tuple(tensor.shape)}, is "
                    f"given data of shape {tuple(values.shape)} and {values.dtype}.",
                    remedy="Give it data of the same shape and dtype, or change it before training.",
                )
        with local_mode(), torch.no_grad():
            own = _own_values(values, self)
            is_plain = not isinstance(values, DTensor)
            if is_plain and self._source is not None and self._source.is_still(values, own):
                # `p.data = t` shares memory with `t`. A second assignment of the same memory changes nothing.
                return
            for ref in self._aliases:
                alias = ref()
                if alias is not None:
                    alias.part_from()
            self._aliases = []
            self._forget()
            if is_plain and self._is_compared:
                self._keeper.note_written(self, checksum(values))
            self.local.copy_(own)
            self._source = AssignedData(values, own) if is_plain else None
        self._keeper.add_assigned(self)

    def keeps_source(self) -> bool:
        """Return True if user code still holds the tensor that ``data`` was set to."""
        if self._source is not None and not self._source.is_shared:
            self._source = None
        return self._source is not None

    @property
    def _is_differentiated(self) -> bool:
        """True if a loss may depend on the gathered tensor, whose memory must not change then."""
        return False

    @property
    def _is_compared(self) -> bool:
        """True if all ranks must write the same values, and compare their writes."""
        return False

    def forget(self) -> None:
        """Copy changes back, and free the gathered tensor."""
        self.flush()
        self._forget()

    @property
    def is_viewed(self) -> bool:
        """True if anything but this part holds the memory of the gathered tensor, and may write into it."""
        return self._value is not None and storage_users(self._value) > self._users

    def _forget(self) -> None:
        self._value = self._seen = None

    def _local_state(self) -> tuple[int, int]:
        return self.local._version, self.local.data_ptr()

    def gradient_shown(self) -> Tensor | None:  # noqa: D102
        with local_mode():
            return self.tensor.grad

    def gradient_given(self, gradient: Any) -> None:  # noqa: D102
        with local_mode():
            self.tensor.grad = gradient

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:  # noqa: D102
        with local_mode():
            return register(self.tensor, hook)


class AliasPart(HeldByTensor, ShardedPart):
    """The part of a tensor that shares memory with another: its ``data``, or the result of ``detach``.

    Args:
        tensor: The DTensor.
        of: The part whose memory it shares.
    """

    def __init__(self, tensor: Tensor, of: ShardedPart) -> None:
        super().__init__(tensor, of._keeper, of.name)
        self._of: ShardedPart | None = of
        self._shared: Tensor | None = of.tensor  # a strong reference: the part `of` does not keep it alive

    def value(self) -> Tensor:
        return super().value() if self._of is None else self._of.value()

    def flush(self) -> None:
        if self._of is None:
            super().flush()
        else:
            self._of.flush()

    def randomized(self) -> None:
        if self._of is None:
            super().randomized()
        else:
            self._of.randomized()

    def part_from(self) -> None:
        """Stop sharing memory and keep the present values, because the other tensor gets new data."""
        self.flush()
        with local_mode(), torch.no_grad():
            self.dtensor._local_tensor = self.local.clone()
        self._of = self._shared = None


class GradientPart(HeldByTensor, ShardedPart):
    """The part of the gradient of a sharded parameter."""


class ParameterPart(ShardedPart):
    """The part of a sharded parameter.

    Args:
        plain: The user's own object, which has no values while the parameter is sharded.
        held: The parameter in the hands of FSDP2.
        keeper: The object that decides how long the gathered tensor is kept.
        name: The name for messages.

    Attributes:
        may_be_written: True if user code has taken the memory of the gathered parameter.
    """

    def __init__(self, plain: nn.Parameter, held: HeldParameter, keeper: Keeper, name: str) -> None:
        super().__init__(held.sharded, keeper, name)
        self.plain = plain
        self.held = held
        self.may_be_written = False
        self._leaf: Tensor | None = None

    def unsharded(self) -> Tensor:  # noqa: D102
        is_recorded = torch.is_grad_enabled() and self.tensor.requires_grad
        value = self.value()
        if not is_recorded:
            return value
        # Autograd needs one leaf for each gathered value: `Weights.backward` averages its gradient over
        # the ranks and adds it to the shard's. A new value has other memory, hence another leaf.
        if self._leaf is None or self._leaf.data_ptr() != value.data_ptr():
            with local_mode():
                self._leaf = value.detach().requires_grad_()
            self._keeper.add_leaf(self, self._leaf)
        return self._leaf

    def differentiated(self) -> list[Tensor]:  # noqa: D102
        return [tensor for tensor in (self.held.gathered, self._leaf) if tensor is not None]

    @property
    def _is_differentiated(self) -> bool:
        return self._leaf is not None

    @property
    def _is_compared(self) -> bool:
        return self._keeper.is_watched

    @torch.no_grad()
    def add_mean_gradient(self, gradient: Tensor | None) -> None:
        """Add this rank's shard of the mean of the ranks' gradients. Collective.

        Args:
            gradient: The gradient of the gathered parameter on this rank; None if only other ranks have one.
        """
        tensor = self.dtensor
        mesh = tensor.device_mesh
        if gradient is None:
            gradient = torch.zeros(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
        summed = DTensor.from_local(
            gradient.to(mesh.device_type).contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False
        ).redistribute(placements=tensor.placements)
        mean = self.like((summed.to_local() / mesh.size()).to(tensor.device))
        if tensor.grad is None:
            tensor.grad = mean
        else:
            tensor.grad._local_tensor.add_(mean._local_tensor)  # type: ignore[attr-defined]

    def drop_leaf(self) -> None:
        """Gather again for the next loss; a loss that depends on what was gathered keeps it."""
        self._leaf = None

    def release(self) -> None:
        """Free all memory after FSDP2 was removed from the module, even if something refers to this part."""
        for ref in self._aliases:
            alias = ref()
            if alias is not None:
                alias.part_from()
        self._value = self._leaf = self._source = None
        self._aliases = []
        with local_mode():
            unguard(self.tensor.grad)  # C++ holds it: gc cannot see the circle through its guard
        self.held.release()
        self.tensor = self.plain

    def gradient_shown(self) -> Tensor | None:
        """Return the gradient, guarded like the parameter."""
        with local_mode():
            self._keeper.settle()
            gradient = self.tensor.grad
            known = part_of(gradient)  # a `Pending` without a part behind it
            if isinstance(gradient, DTensor) and (known is None or known.is_complete):
                guard(gradient, GradientPart(gradient, self._keeper, f"the gradient of {self.name}"))
            return gradient

    def gradient_given(self, gradient: Any) -> None:  # noqa: D102
        with local_mode():
            self._keeper.settle()
            if isinstance(gradient, Tensor):
                if gradient.shape != self.tensor.shape:
                    raise RuntimeError(
                        f"a gradient of shape {tuple(gradient.shape)} is given to a parameter of shape "
                        f"{tuple(self.tensor.shape)}."
                    )
                if self.tensor.grad is None and not isinstance(gradient, DTensor):
                    refuse_unequal_gradient(gradient, self.name)
                if not isinstance(gradient, DTensor) or _is_elsewhere(gradient, self):
                    gradient = self.like(_own_values(gradient.to(self.tensor.dtype), self).detach().clone())
            elif gradient is None:
                self.held.drop_unreduced_gradient()
            self.tensor.grad = gradient

    def like(self, local: Tensor) -> DTensor:
        """Return a DTensor with this parameter's sharding."""
        tensor = self.dtensor
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        """Register a hook on the user's object; `Weights` calls it with the complete gradient."""
        with local_mode():
            nn.Parameter.requires_grad_(self.plain, self.tensor.requires_grad)
            return register(self.plain, hook)

    def in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:  # noqa: D102
        self._refuse_while_gathered()
        return super().in_place(func, args, kwargs)

    def assign(self, values: Tensor) -> None:  # noqa: D102
        self._refuse_while_gathered()
        super().assign(values)

    def _refuse_while_gathered(self) -> None:
        if self.held.is_gathered:
            raise UnsupportedError(
                f"{self.name!r} is written through a reference from before the forward that gathered its "
                "layer, so the next forward would compute with the old values.",
                remedy="Write into what `self.parameters()` returns after each forward.",
            )

    def take_written(self) -> None:
        """Copy a step's writes to the gathered parameter into the shard."""
        gathered = self.held.gathered
        if gathered is None:
            return
        is_written = gathered._version != self.held.gathered_version
        if is_written or self.may_be_written:
            before, self.held.gathered_sum = self.held.gathered_sum, None
            if before is not None and self._is_compared:
                self.held.gathered_sum = checksum(gathered)  # it may stay gathered and be written again
                self._keeper.note_written(self, self.held.gathered_sum - before)
            self._write_changes(gathered, surely=is_written)
            self.held.gathered_version, self.may_be_written = gathered._version, False

    @torch.no_grad()
    def _write_changes(self, gathered: Tensor, *, surely: bool) -> None:
        """Copy the elements that differ into the shard.

        Args:
            gathered: The gathered parameter.
            surely: True if every rank has written. Otherwise only ranks with a changed element copy.
        """
        with local_mode():
            own, local = self.own(gathered.detach()), self.local
            before = local.to(own.device, own.dtype)
            changed = (own != before) & ~(own.isnan() & before.isnan())
            if surely or bool(changed.any()):
                local.copy_(torch.where(changed.to(local.device), own.to(local.device, local.dtype), local))


class _NotHereError(Exception):
    """Raised if an elementwise function needs elements of other ranks."""


def _own(argument: Any, part: ShardedPart) -> Any:
    """Return the local shard of an argument of an elementwise function."""
    if isinstance(argument, Guard):
        known = argument._part
        known.flush()
        argument = known.tensor
    if isinstance(argument, DTensor):
        if argument is not part.tensor and _is_elsewhere(argument, part):
            raise _NotHereError
        return argument._local_tensor
    if isinstance(argument, Tensor):
        if argument.ndim == 0:
            return argument
        with local_mode():
            return part.own(argument.detach().expand(part.tensor.shape))
    if isinstance(argument, (list, tuple)):
        raise _NotHereError
    return argument


def _sum_of(arguments: Sequence[Any]) -> Tensor | int:
    """Return a checksum of the arguments of an in-place change, without the sharded ones."""
    total: Tensor | int = 0
    for place, argument in enumerate(arguments):
        if isinstance(argument, (list, tuple)):
            total = total + _sum_of(argument)
        elif isinstance(argument, Tensor) and not isinstance(argument, DTensor):
            total = total + checksum(argument)
        elif isinstance(argument, (str, int, float)):
            total = total + digest((place, argument)) // 2**16  # as a tensor the sum has 64 bits: leave room
    return total


def _own_lists(argument: Any, parts: Sequence[ShardedPart]) -> Any:
    if isinstance(argument, (list, tuple)) and len(argument) == len(parts):
        return [_own(item, part) for item, part in zip(argument, parts, strict=True)]
    if isinstance(argument, Tensor) and argument.ndim:
        raise _NotHereError
    return argument


def _own_values(tensor: Tensor, part: ShardedPart) -> Tensor:
    """Return the local shard of a tensor of the logical shape. Collective if it has another sharding."""
    with local_mode():
        try:
            return cast(Tensor, _own(tensor, part))
        except _NotHereError:
            return part.own(gather(cast(DTensor, tensor)))


def _is_elsewhere(tensor: DTensor, part: ShardedPart) -> bool:
    own = part.dtensor
    return (tensor.shape, tensor.placements) != (own.shape, own.placements) or (
        tensor.device_mesh != own.device_mesh
    )


def gather(tensor: DTensor) -> Tensor:
    """Return the unsharded tensor, in its own memory, on the device of the shards. Collective."""
    with local_mode():
        shard: Any = tensor.detach()
        if shard.device.type != shard.device_mesh.device_type:  # offloaded: gather on the device of the mesh
            shard = shard.to(shard.device_mesh.device_type)
        full: Tensor = shard.full_tensor().to(tensor.device)
        own = tensor._local_tensor
        shares = full.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return full.clone() if shares else full
