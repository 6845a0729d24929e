"""Store all parameters of one module on this rank: shard, use, reduce, describe and restore them.

The engine calls this module. An `Arrival` brings the module to its device. `Parameters` connects `part` (the
shard and user code's view of it), `reducer` (gradients) and `zero` (rows); it does none of their work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from nnx_base._torch_compat import local_mode
from nnx_base.clean_up import clean_up
from nnx_base.ranks import broadcast_tensor, is_distributed
from nnx_base.shard import Shard, shard_of
from nnx_core._torch_compat import guarded_mode
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import Writes
from nnx_core.communicator import Communicator, GroupCommunicator
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import can_be_guarded, guard, show_plain, show_unsharded, unguard
from nnx_core.view.modules import materialize, refuse_without_reset
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.ir.placement import Placement, R
from nnx_nnscaler.runtime.functions import Conversions
from nnx_nnscaler.runtime.part import (
    GradientParts,
    LocalPart,
    ParameterLayout,
    Part,
    StagePart,
    Summand,
    UnitPart,
    rows_of,
)
from nnx_nnscaler.runtime.reducer import BUCKET_BYTES, Reducer
from nnx_nnscaler.runtime.zero import RowBucket, RowPart, make_row_buckets

__all__ = [
    "Parameters",
]


# A module moves to its device submodule by submodule, with rank zero's values on every rank. Each parameter
# is sharded as soon as it has arrived, so that the device never holds the complete module.


class Arrival:
    """Brings a module to a device, with rank zero's values. All of it is collective.

    Args:
        module: The module. Tensors on the meta device get their values from ``reset_parameters``.
        device: The device.

    Raises:
        UnsupportedError: A submodule has meta tensors and no ``reset_parameters``.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        refuse_without_reset(module, name="")
        self._module = module
        self._device = device
        self._left = deque(module.named_modules())
        self._reached: set[str] = set()
        self._seen: set[nn.Parameter] = set()
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def is_there(self) -> bool:
        """True if the complete module is on the device, so that at most its values are exchanged."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        return all(tensor.device == self._device for tensor in tensors)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of that name, on the device; call it in the module's order."""
        owner = name.rpartition(".")[0]
        while owner not in self._reached:
            self._bring_next()
        return self._module.get_parameter(name)

    def finish(self) -> bool:
        """Bring the remaining submodules; return True if any remained."""
        was_left = bool(self._left)
        while self._left:
            self._bring_next()
        return was_left

    @torch.no_grad()
    def _bring_next(self) -> None:
        name, submodule = self._left.popleft()
        self._reached.add(name)
        self._materialize(submodule, name)
        own = [parameter for parameter in submodule.parameters(recurse=False) if parameter not in self._seen]
        self._seen.update(own)
        for parameter in own:
            if parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)
        for key, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[key] = buffer.to(self._device)
        for tensor in (*own, *submodule.buffers(recurse=False)):
            if is_distributed() and tensor.numel():
                broadcast_tensor(tensor)

    def _materialize(self, submodule: nn.Module, name: str) -> None:
        """Materialize a submodule's own meta tensors; tied parameters stay tied, with the first's values."""
        before = {key: p for key, p in submodule._parameters.items() if p is not None and p.is_meta}
        materialize(cast(nn.Module, _Alone(submodule)), self._device, name=name)
        for key, parameter in before.items():
            made = cast(nn.Parameter, submodule._parameters[key])
            submodule._parameters[key] = self._replaced.setdefault(parameter, made)


class _Alone:
    """A submodule without its children, for `materialize`."""

    def __init__(self, submodule: nn.Module) -> None:
        self._submodule = submodule

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield "", self._submodule


# The sharding of a guarded parameter's gradients follows from that of the parameter. These classes store no
# gradient: autograd and the reducer do. Outside of local mode, the guard of the parameter asks them how to
# gather a gradient for user code.


class ShardGradients:
    """The gradients of a sharded parameter, which are sharded like it."""

    def are_whole(self) -> bool:  # the protocol has the docstrings, here and below
        return False

    def source_of(self, gradient: Tensor) -> UnitPart:
        return LocalPart(gradient)

    def assigned(self) -> None:
        pass


class SynchronizedGradients:
    """The gradients of a replicated parameter that the reducer sums over the unit.

    Before the sum, such as while gradients accumulate, each rank has a summand.
    """

    def __init__(self, parameter: nn.Parameter, reducer: Reducer, unit: Conversions) -> None:
        self._parameter = parameter
        self._reducer = reducer
        self._unit = unit

    def are_whole(self) -> bool:
        return self._reducer.is_complete(self._parameter)

    def source_of(self, gradient: Tensor) -> UnitPart:
        return _Summand(gradient, self._unit, is_sum=lambda: self._is_sum(gradient))

    def _is_sum(self, gradient: Tensor) -> bool:
        return self.are_whole() and self._parameter.grad is gradient

    def assigned(self) -> None:
        self._reducer.note_complete(self._parameter)


class _Summand(Summand):
    """A summand, which the reducer turns into the sum in place."""

    def __init__(self, tensor: Tensor, unit: Conversions, *, is_sum: Callable[[], bool]) -> None:
        super().__init__(tensor, unit)
        self._is_sum = is_sum

    @property
    def is_gathered(self) -> bool:
        return not self._is_sum()

    def value(self) -> Tensor:
        return self._tensor.detach() if self._is_sum() else super().value()

    def write(self, value: Tensor) -> None:
        if self._is_sum():
            LocalPart(self._tensor).write(value)
        else:
            super().write(value)


class RowGradients:
    """The gradients of a parameter in rows, which are rows too."""

    def __init__(self, rows: RowPart) -> None:
        self._rows = rows

    def are_whole(self) -> bool:
        return False

    def source_of(self, gradient: Tensor) -> UnitPart:
        return _Rows(gradient, self._rows)

    def assigned(self) -> None:
        pass


class StageGradients:
    """The gradients of a parameter that one pipeline stage stores, which the same stage stores.

    Args:
        source: The source of the parameter.
        inside: The gradients within the stage.
    """

    def __init__(self, source: StagePart, inside: GradientParts) -> None:
        self._source = source
        self._inside = inside

    def are_whole(self) -> bool:
        return False

    def source_of(self, gradient: Tensor) -> UnitPart:
        return self._source.of(gradient, self._inside.source_of(gradient))

    def assigned(self) -> None:
        self._inside.assigned()


class _Rows:
    """A tensor that is stored in the same rows as a parameter."""

    is_gathered = True

    def __init__(self, tensor: Tensor, rows: RowPart) -> None:
        self._tensor = tensor
        self._rows = rows

    def value(self) -> Tensor:
        return self._rows.gathered(self._tensor.detach())

    def differentiable(self) -> Tensor:
        return self.value()

    def write(self, value: Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(self._rows.layout.stored_rows(value))

    def replace(self, value: Tensor) -> None:
        self._tensor.data = self._rows.layout.stored_rows(value).clone()


T = TypeVar("T")


class Parameters:
    """The parameters of one module on this rank. Construction shards them in place; objects stay. Collective.

    Args:
        module: A module with unsharded parameters, equal on all ranks unless an `arrival` still brings them.
        axes: This rank's groups.
        stored: The placement within the unit by the name of the parameter; ``R`` for all others. A tied
            parameter goes by any of its names.
        synchronized: The names of parameters whose gradients are partial on every rank of the unit.
        unit: The collectives of the unit, if not those of `axes`.
        bucket_bytes: The number of bytes that travel together.
        order: The check for a gather that only some of the ranks start.
        arrival: The source of the parameters; it brings each one after the one before it was sharded.
        homes: The rank along the pipe that stores each parameter, by any of its names; the first one for all
            others. None without a pipeline.

    Attributes:
        reducer: The reducer of the gradients.
        is_watched: True if the ranks compare user code's writes.

    Example:
        >>> axes = Axes(None, None, None, None, None, 0, 1, 0, 1, 0, 1)
        >>> parameters = Parameters(nn.Linear(2, 3), axes)
        >>> parameters.layout(parameters.named["weight"]).is_whole
        True
    """

    def __init__(
        self,
        module: nn.Module,
        axes: Axes,
        *,
        stored: Mapping[str, Placement] | None = None,
        synchronized: frozenset[str] = frozenset(),
        unit: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        order: CollectiveOrder | None = None,
        arrival: Arrival | None = None,
        homes: Mapping[str, int] | None = None,
    ) -> None:
        self.axes = axes
        self.is_watched = False
        self._homes = None if homes is None else _by_parameter(module, homes)
        self._order = order
        self._writes = Writes(lambda: self.is_watched)
        self.named: dict[str, nn.Parameter] = {}
        self._unit = Conversions(unit or GroupCommunicator(axes.unit))
        self._layouts: dict[nn.Parameter, ParameterLayout] = {}
        self._strides: dict[nn.Parameter, Tensor] = {}
        self._parts: dict[nn.Parameter, Part] = {}
        self._in_use: set[Part] = set()
        self._synchronized: set[nn.Parameter] = set()
        self._rows = self._store(module, stored or {}, synchronized, arrival, bucket_bytes)
        parts = [part for bucket in self._rows for part in bucket.parts]
        in_rows = [part.parameter for part in sorted(parts, key=lambda part: part.index)]
        # The order in the model, not the storage, numbers the parameters: stages store different ones, and
        # the reducer compares numbers over all ranks.
        place = {parameter: number for number, parameter in enumerate(self.named.values())}
        others = [parameter for parameter in self.named.values() if parameter not in set(in_rows)]
        self.reducer = Reducer(
            others,
            axes,
            elsewhere=[parameter for parameter in others if not self._layouts[parameter].is_here],
            places=[place[parameter] for parameter in (*others, *in_rows)],
            synchronized=list(self._synchronized),
            rows=self._rows,
            sparse=any(getattr(submodule, "sparse", False) for submodule in module.modules()),
            bucket_bytes=bucket_bytes,
        )
        for bucket in self._rows:
            bucket.reducer = self.reducer
        for part in self._parts.values():
            part.gradients = self._gradients_of(part)
        self.reducer.on_end = self.end_step
        self.reducer.attach()

    def _layout_of(self, name: str, parameter: nn.Parameter, placement: Placement) -> ParameterLayout:
        shape, axes = tuple(parameter.shape), self.axes
        if (placement.is_shard or self._homes is not None) and not can_be_guarded(parameter):
            raise UnsupportedError(
                f"parameter {name!r} is a {type(parameter).__name__}, which cannot be sharded.",
                remedy="Plan it as 'R', without a pipeline.",
            )
        layout = ParameterLayout(
            shape=shape,
            placement=placement,
            unit_rank=axes.unit_rank,
            unit_size=axes.unit_size,
            is_here=self._homes is None or self._homes.get(parameter, 0) == axes.pipe_rank,
            is_everywhere=self._homes is None,
        )
        if axes.part_size == 1 or not shape or not can_be_guarded(parameter) or not layout.is_here:
            return layout
        rows = rows_of(layout.unit_shape[0], rank=axes.part_rank, size=axes.part_size)
        return replace(layout, rows=rows)

    @torch.no_grad()
    def _store(
        self,
        module: nn.Module,
        stored: Mapping[str, Placement],
        synchronized: frozenset[str],
        arrival: Arrival | None,
        bucket_bytes: int,
    ) -> list[RowBucket]:
        """Shard the data, one parameter after the other, and guard the sharded parameters."""
        placements = _by_parameter(module, stored)
        summed = set(_by_parameter(module, dict.fromkeys(synchronized, True)))
        named = list(module.named_parameters())
        layouts = [self._layout_of(name, found, placements.get(found, R)) for name, found in named]
        in_rows: list[tuple[str, nn.Parameter, ParameterLayout]] = []
        for (name, found), layout in zip(named, layouts, strict=True):
            parameter = found if arrival is None else arrival.parameter(name)
            self.named[name] = parameter
            # `arrival` may replace a meta parameter, so later lookups use the new object.
            if self._homes is not None and found in self._homes:
                self._homes[parameter] = self._homes[found]
            self._layouts[parameter] = layout
            self._strides[parameter] = torch.empty_like(parameter, device="meta")
            if found in summed and layout.is_here:
                self._synchronized.add(parameter)
            if not self.is_whole(parameter):
                parameter.grad = None
                # A copy, because a view would keep the memory of the complete parameter alive.
                parameter.data = layout.local_part(parameter.data).clone(
                    memory_format=torch.contiguous_format
                )
            if layout.rows is not None:
                in_rows.append((name, parameter, layout))
            elif self._homes is not None or layout.placement.is_shard or parameter in self._synchronized:
                self._guard(name, parameter, LocalPart(parameter))
        first = len(self._layouts) - len(in_rows)
        buckets = make_row_buckets(
            in_rows,
            self.axes,
            first=first,
            limit=bucket_bytes,
            synchronized=self._synchronized,
            order=self._order if self._homes is None else None,  # stages gather rows independently
        )
        for bucket in buckets:
            for part in bucket.parts:
                self._guard(part.name, part.parameter, part)
        return buckets

    def _guard(self, name: str, parameter: nn.Parameter, source: LocalPart | RowPart) -> None:
        part = self._parts[parameter] = Part(
            parameter,
            self._layouts[parameter],
            unit=self._unit,
            source=self._from_its_stage(parameter, source),
            synchronized=parameter in self._synchronized,
            in_use=self._in_use,
            name=name,
            order=self._order,
            on_write=partial(self._writes.add, parameter),
        )
        guard(parameter, part)

    def take_written(self, module: nn.Module) -> dict[str, int]:
        """Return the checksums for `Backend.written`: of this rank's stage, and of others it wrote to."""
        self.flush()
        here = {name for name, p in self.named.items() if p in self._parts and self._layouts[p].is_here}
        return {name: sum_ for name, sum_ in self._writes.take(module).items() if sum_ or name in here}

    def _from_its_stage(self, parameter: nn.Parameter, source: UnitPart) -> UnitPart:
        """Return the source of a shard; with a pipeline only one stage stores it."""
        if self._homes is None or self.axes.pipe is None:
            return source
        home = self._homes.get(parameter, 0)
        return StagePart(parameter, source, self._layouts[parameter], pipe=self.axes.pipe, home=home)

    def _gradients_of(self, part: Part) -> GradientParts:
        inside = part.source.inside if isinstance(part.source, StagePart) else part.source
        found: GradientParts = ShardGradients()
        if isinstance(inside, RowPart):
            found = RowGradients(inside)
        elif part.synchronized:
            found = SynchronizedGradients(cast(nn.Parameter, part.tensor), self.reducer, self._unit)
        return StageGradients(part.source, found) if isinstance(part.source, StagePart) else found

    @torch.no_grad()
    def give_back(self, at_end: Callable[..., Tensor] = lambda gather, **_: gather()) -> None:
        """Restore every parameter's class and unsharded data, without gradient. Collective.

        Sharded parameters end up in host memory, because the device may be too small for all of them.

        Args:
            at_end: `Backend.at_end`, which decides what this rank keeps; by default everything.
        """
        self.reducer.detach()
        self.end_step()
        for parameter in self.named.values():
            part = self._parts.get(parameter)
            if part is None:
                continue
            description = self._strides[parameter]
            # `part.value` gathers one parameter at a time: the device holds at most one complete parameter.
            gather = partial(_on_host, description, part.value)
            kept = at_end(gather, shape=description.shape, dtype=description.dtype)
            unguard(parameter)
            parameter.grad = None
            parameter.data = kept
            part.release()
            inside = part.source.inside if isinstance(part.source, StagePart) else part.source
            if isinstance(inside, RowPart) and inside is inside.bucket.parts[-1]:
                inside.bucket.release()
        self._parts.clear()

    @contextmanager
    def local_mode(self) -> Iterator[None]:
        """Context manager in which every parameter is its local shard, for programs and engine code."""
        self.flush()
        with local_mode():
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context manager of an optimizer's step: parameters are plain local tensors, by their class too."""
        self.end_step()
        self._show_plain()
        with clean_up("ending the optimizer's step", self._show_unsharded, self.end_step):
            yield

    def _show_unsharded(self) -> None:
        for parameter in self._parts:
            show_unsharded(parameter)

    def _show_plain(self) -> None:
        for parameter in self._parts:
            show_plain(parameter)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Show unsharded parameters again inside of `stepping`, for a closure."""
        self._show_unsharded()
        with clean_up("writing weights back", self.flush, self._show_plain), guarded_mode():
            yield

    def unit_local(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard within the unit as a plain tensor, for programs.

        Gradients reach the parameter. The tensor stays plain outside of local mode, because backward
        recomputes activations there.
        """
        part: Part | None = getattr(parameter, "_part", None)  # faster than a lookup in a dict of tensors
        if part is None:
            return parameter
        if part.is_kept:
            part.flush()
        with local_mode():
            part.in_programs = True
            source = part.source.differentiable()
            # Outside of local mode the parameter itself is guarded; a view from here stays plain.
            return source.view_as(source) if source is parameter else source

    def flush(self) -> None:
        """Copy in-place changes of gathered values back."""
        for part in tuple(self._in_use):
            part.flush()

    def end_step(self) -> None:
        """Free gathered tensors; runs after every step, in training or not."""
        with local_mode():
            for part in tuple(self._in_use):
                part.release()
            for bucket in self._rows:
                bucket.release()

    def layout(self, parameter: nn.Parameter) -> ParameterLayout:
        """Return the layout of a parameter on this rank."""
        return self._layouts[parameter]

    def state_part(self, value: Tensor, parameter: nn.Parameter, name: str) -> Part | None:
        """Return the guard of a tensor in an optimizer's state; None if this rank stores all of it."""
        part = self._parts.get(parameter)
        return None if part is None else part.state(value, name)

    def knows(self, tensor: Tensor) -> bool:
        """Return True if a tensor is one of the parameters."""
        return tensor in self._layouts

    def is_whole(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank stores all of a parameter."""
        layout = self._layouts[parameter]
        return layout.is_everywhere and layout.rows is None and not layout.placement.is_shard

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the local shard of a parameter, as a plain tensor."""
        self.flush()
        with local_mode():
            return parameter.detach()

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the shard of a tensor: a parameter, or optimizer state of `parameter`."""
        if parameter is None:
            parameter = cast(nn.Parameter, tensor)
            tensor = self.local(parameter) if parameter in self._layouts else tensor
        layout = self._layouts.get(parameter)
        if layout is None or tuple(tensor.shape) != layout.local_shape:
            return shard_of(tensor)
        return layout.shard_of_local(tensor)

    def replicas(self, parameter: nn.Parameter) -> int:
        """Return the number of ranks that store the same elements of a parameter."""
        layout, axes = self._layouts[parameter], self.axes
        cut = (axes.unit_size if layout.placement.is_shard else 1) * (axes.part_size if layout.rows else 1)
        return axes.unit_size * axes.outer_size // cut


def _by_parameter(module: nn.Module, values: Mapping[str, T]) -> dict[nn.Parameter, T]:
    """Return the values by parameter, from values by any of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: values[name] for name, parameter in named if name in values}


def _on_host(description: Tensor, gather: Callable[[], Tensor]) -> Tensor:
    """Return a gathered tensor in host memory, with the strides of the user's tensor."""
    whole = gather()
    return torch.empty_like(description, dtype=whole.dtype, device="cpu").copy_(whole)
