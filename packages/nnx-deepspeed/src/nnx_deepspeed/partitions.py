"""Describe this rank's shards under ZeRO: masters, optimizer state and gradients.

The shards are views of DeepSpeed's buffers. Stages 1 and 2 shard a param group as one flat vector, so a
rank may hold the end of one parameter and the beginning of the next. Stage 3 splits every parameter into
equal shards and pads the last one. In both layouts a shard is a range of a flattened parameter, and
`nnx_base.shard.shard_of_range` describes it.

User code sees full parameters (`ShardedParameter`) and full gradients (`GatheredGradients`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base._torch_compat import local_mode
from nnx_base.box import cut_range
from nnx_base.shard import Box, Shard, shard_of, shard_of_range
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.errors import CheckpointError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.view.guard import Part
from nnx_deepspeed._deepspeed_compat import (
    fragment,
    gather_for_user,
    gradient_slices,
    local_partition,
    local_range,
    position,
    trainable_groups,
)
from nnx_deepspeed._operators_compat import counts_steps_as_int

# DeepSpeed keeps float32 masters of the trained parameters, and rounds frozen ones to 16 bits without a
# master. Checkpoints and the module after training need the exact frozen values, so each rank keeps a
# shard of them here, in host memory.


class FrozenValues:
    """This rank's shards of the exact values of frozen parameters.

    Args:
        exact: The values of all parameters before DeepSpeed's engine was made. The class keeps the values
            that DeepSpeed has rounded.
    """

    def __init__(self, exact: Mapping[nn.Parameter, Tensor]) -> None:
        self._shards: dict[nn.Parameter, Tensor] = {}
        for parameter, value in exact.items():
            if not parameter.requires_grad and parameter.dtype != value.dtype:
                start, weights = local_range(parameter)
                shard = value.flatten()[start : start + weights.numel()]
                self._shards[parameter] = shard.to("cpu", copy=True)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._shards

    def shard(self, parameter: nn.Parameter, shape: torch.Size) -> Shard:
        """Return this rank's shard; values written into it take effect after `reload`."""
        return shard_of_range(self._shards[parameter], shape=shape, start=local_range(parameter)[0])

    def follow(self) -> None:
        """Copy values that were written into the weights to the exact values."""
        for parameter, shard in self._shards.items():
            follow(shard, local_range(parameter)[1])

    def reload(self) -> None:
        """Round the exact values into the weights. Collective in stages 1 and 2, which replicate them."""
        for parameter, shard in self._shards.items():
            _, weights = local_range(parameter)
            if not hasattr(parameter, "ds_tensor"):
                # `weights` is a view of `full`: zeros everywhere but in this rank's range make the sum exact.
                full = parameter.detach().zero_()
                weights.copy_(shard)
                dist.all_reduce(full)
            else:
                weights.copy_(shard)


_CHUNK = 1 << 24
"""Elements compared or copied at a time, which bounds the memory of rounded copies."""


def were_written(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return True if any weights differ from their rounded masters. Synchronises with each device once.

    Args:
        pairs: Pairs of flat weights and their masters.
    """
    differ: dict[torch.device, Tensor] = {}
    for weights, masters in pairs:
        if masters.data_ptr() == weights.data_ptr():
            continue  # `share_masters` gave both the same memory
        for chunk, of_masters in zip(*(torch.split(t, _CHUNK) for t in (weights, masters)), strict=True):
            device = of_masters.device
            found = (of_masters.to(chunk.dtype) != chunk.to(device)).any()
            differ[device] = differ[device] | found if device in differ else found
    return any(bool(found) for found in differ.values())


def follow(masters: Tensor, weights: Tensor) -> None:
    """Copy weights into masters where they differ from the rounded masters.

    Args:
        masters: The flat masters.
        weights: The flat weights; they may share their memory with the masters.
    """
    if masters.data_ptr() == weights.data_ptr():
        return
    if masters.dtype == weights.dtype:
        masters.copy_(weights)
        return
    for chunk, of_weights in zip(*(torch.split(t, _CHUNK) for t in (masters, weights)), strict=True):
        new = of_weights.to(chunk.device)
        # Unwritten weights keep their exact master; a copy would replace it by its rounded value.
        torch.where(chunk.to(new.dtype) == new, chunk, new.to(chunk.dtype), out=chunk)


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements ``[start, start + length)`` of a parameter, stored at `offset` of flat partition `flat`.

    All fields except `flat` are 0 if this rank holds no element of the parameter.
    """

    flat: int
    start: int
    offset: int
    length: int


class Partitions:
    """The location of every parameter of a module in DeepSpeed's flat partitions.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        rank: This rank.
        module: The module.
        frozen: The exact values of frozen parameters.

    Attributes:
        frozen: The exact values of frozen parameters.
        missed: The number of steps that each parameter has missed, for parameters that missed any.
    """

    def __init__(self, zero: Any, *, rank: int, module: nn.Module, frozen: FrozenValues) -> None:
        self.frozen = frozen
        self._zero = zero
        self._rank = rank
        self._is_stage_3 = hasattr(zero, "fp16_groups")
        self._shapes = {parameter: _shape(parameter) for parameter in module.parameters()}
        groups = trainable_groups(zero)
        self._flats = [flat for _, flat in groups]
        self._ranges: dict[nn.Parameter, _Range] = {}
        self._flat_of: dict[nn.Parameter, int] = {}
        self.missed: dict[nn.Parameter, int] = {}
        for index, (parameters, _) in enumerate(groups):
            for parameter in parameters:
                self._flat_of[parameter] = index
                self._ranges[parameter] = self._range(parameter, index)
        # Flat partitions share one state per group, so a parameter that never had a gradient would seem to
        # have state. torch gives such a parameter none, and neither does `state`.
        self._unstepped = set(self._flat_of)

    def _range(self, parameter: nn.Parameter, flat: int) -> _Range:
        if not self._is_stage_3:
            return _Range(flat, *(fragment(parameter) or (0, 0, 0)))
        # Every rank's shard has the padded length, so the last ranks may hold fewer elements, or none.
        offset, padded = position(self._zero, parameter)
        low, numel = self._rank * padded, self._shapes[parameter].numel()
        start, length = cut_range(0, numel, low=low, high=low + padded)
        return _Range(flat, start, offset if length else 0, length)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter; stage 3 empties the tensor itself between steps."""
        return self._shapes[parameter]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._shapes

    def shard_like(self, parameter: nn.Parameter, tensor: Tensor) -> Shard:
        """Describe a tensor that has a parameter's layout between steps.

        The tensor is replicated in stages 1 and 2, and a flat shard in stage 3.
        """
        shape = self._shapes[parameter]
        if tensor.shape == shape or not self._is_stage_3:
            return shard_of(tensor)
        if not tensor.numel() or not shape.numel():  # DeepSpeed pads parameters without elements to one
            return Shard(tuple(shape), tensor.dtype, (), ())
        return shard_of_range(tensor.detach(), shape=shape, start=self._rank * self._padded(parameter))

    def _padded(self, parameter: nn.Parameter) -> int:
        return local_partition(parameter).numel()

    def master(self, parameter: nn.Parameter) -> Shard:
        """Return this rank's shard of a parameter's master weights, or of a frozen parameter's weights."""
        if parameter in self._flat_of:
            return self._shard(parameter, self._flats[self._flat_of[parameter]])
        if parameter in self.frozen:
            return self.frozen.shard(parameter, self._shapes[parameter])
        if not self._is_stage_3:
            return shard_of(parameter)
        start, held = local_range(parameter)
        return shard_of_range(held.flatten(), shape=self._shapes[parameter], start=start)

    def load_exact(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Copy the exact weights into the masters, which DeepSpeed has made from rounded weights."""
        for parameter, value in values.items():
            if parameter.requires_grad:
                self.master(parameter).fill_from(value)

    @property
    def shards_each_parameter(self) -> bool:
        """True if ranks hold shards of each single parameter, as in stage 3."""
        return self._is_stage_3

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Return True if ranks hold different shards of a parameter. All ranks get the same answer."""
        return self._is_stage_3 or parameter in self._flat_of or parameter in self.frozen

    def _shard(self, parameter: nn.Parameter, flat: Tensor) -> Shard:
        local = self._ranges[parameter]
        held = flat.detach().narrow(0, local.offset, local.length)
        return shard_of_range(held, shape=self._shapes[parameter], start=local.start)

    def state(self, parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's shard of a parameter's optimizer state, by name.

        Values that are no shards, such as ``step``, belong to the whole param group.
        """
        if parameter not in self._flat_of or self._has_no_state(parameter):
            return {}
        flat = self._flats[self._flat_of[parameter]]
        held = dict(optimizer.state.get(flat, {}))
        if "step" in held:
            held["step"] = self._step_count(parameter, held["step"])
        if "step" in held and counts_steps_as_int(optimizer):
            held["step"] = torch.tensor(float(held["step"]))  # the type that torch's optimizers save
        return {
            name: self._shard(parameter, value) if _is_flat(value, flat) else _replicated(value)
            for name, value in held.items()
        }

    def range_of(self, parameter: nn.Parameter) -> tuple[Tensor, int, int] | None:
        """Return a parameter's flat partition, this rank's offset in it, and the length there."""
        local = self._ranges[parameter]
        return (self._flats[local.flat], local.offset, local.length) if local.length else None

    def count_step(self, unused: Sequence[nn.Parameter]) -> None:
        """Count one step, which left the given parameters unchanged."""
        for parameter in unused:
            self.missed[parameter] = self.missed.get(parameter, 0) + 1
        if self._unstepped:
            self._unstepped.intersection_update(unused)

    def _has_no_state(self, parameter: nn.Parameter) -> bool:
        return parameter in self.missed and parameter in self._unstepped

    def _step_count(self, parameter: nn.Parameter, count: Any) -> Any:
        missed = self.missed.get(parameter, 0)
        return count - missed if missed else count

    def allocate(self, saved: Mapping[nn.Parameter, Mapping[str, Any]], optimizer: Optimizer) -> None:
        """Allocate optimizer state, and copy values that all elements share, such as ``step``.

        Args:
            saved: The state of each parameter by name: tensors, or handles with ``shape`` and ``dtype``.
            optimizer: The optimizer with a state keyed by flat partitions.

        Raises:
            CheckpointError: Parameters of one group differ in a shared value; DeepSpeed keeps one for all.
        """
        optimizer.state.clear()
        self._unstepped = {p for p in self._flat_of if not saved.get(p)}
        counts = counts_steps_as_int(optimizer)
        for parameter, entries in saved.items():
            flat = self._flats[self._flat_of[parameter]]
            state = optimizer.state[flat]
            for name, value in entries.items():
                if not self._is_elementwise(parameter, name, value):
                    _set_shared(state, name, value, as_number=counts and name == "step")
                elif name not in state:
                    state[name] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
        # A parameter without saved state has missed every step that its group has counted.
        self.missed = {}
        for parameter in self._unstepped:
            of_group = optimizer.state.get(self._flats[self._flat_of[parameter]])
            if of_group and self._shapes[parameter].numel():
                self.missed[parameter] = int(of_group.get("step", 1))

    def _is_elementwise(self, parameter: nn.Parameter, name: str, value: Any) -> bool:
        shape = getattr(value, "shape", None)
        if shape is None or name == "step":
            return False
        # Full tensors and this rank's flat ranges are elementwise; all other shapes are shared by the group.
        return tuple(shape) in (tuple(self._shapes[parameter]), (self._ranges[parameter].length,))

    @torch.no_grad()
    def import_state(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Copy the state of the user's optimizer: full tensors, or this rank's flat ranges."""
        held = {p: dict(optimizer.state.pop(p)) for p in self._flat_of if p in optimizer.state}
        self.allocate(held, shadow)
        for parameter, entries in held.items():
            mine = self.state(parameter, shadow)
            for name, value in entries.items():
                if not self._is_elementwise(parameter, name, value):
                    continue
                if tuple(value.shape) == tuple(self._shapes[parameter]):
                    mine[name].fill_from(value)
                else:
                    start = self._ranges[parameter].start
                    saved = shard_of_range(value, shape=self._shapes[parameter], start=start)
                    for into, view in zip(mine[name].data, saved.data, strict=True):
                        into.copy_(view)

    @torch.no_grad()
    def export_state(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Give the user's optimizer its full state, in host memory. Collective."""
        for parameter in self._flat_of:
            if self._has_no_state(parameter):
                continue
            flat = self._flats[self._flat_of[parameter]]
            for name, value in shadow.state.get(flat, {}).items():
                if not _is_flat(value, flat):
                    own = self._step_count(parameter, value) if name == "step" else value
                    optimizer.state[parameter][name] = own.clone() if isinstance(own, Tensor) else own
                    continue
                optimizer.state[parameter][name] = self._full_state(parameter, value).cpu()

    def _full_state(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        shape, local = self._shapes[parameter], self._ranges[parameter]
        full = torch.zeros(shape.numel(), dtype=value.dtype, device=parameter.device)
        full.narrow(0, local.start, local.length).copy_(value.narrow(0, local.offset, local.length))
        if dist.get_world_size() > 1:
            dist.all_reduce(full)  # exact: one rank holds each element, and the others add zeros
        return full.view(shape)

    def gradients(self) -> list[Gradient]:
        """Return this rank's reduced gradients, between the last backward and the step."""
        return [Gradient(tensor, replicas=1) for slices in gradient_slices(self._zero) for tensor in slices]

    def flat_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the flat partition that holds this rank's elements of a parameter."""
        return self._flats[self._flat_of[parameter]]

    def shards_of(self, flats: Mapping[Tensor, Tensor]) -> dict[nn.Parameter, tuple[int, Tensor]]:
        """Return this rank's shard of each parameter in tensors that are as long as the flat partitions.

        Args:
            flats: A tensor for some of the flat partitions.
        """
        return {
            parameter: (local.start, flats[flat].detach().narrow(0, local.offset, local.length))
            for parameter, local in self._ranges.items()
            if local.length and (flat := self._flats[local.flat]) in flats
        }

    def gradient_shards(self) -> dict[nn.Parameter, tuple[int, Tensor]]:
        """Return this rank's shard of each reduced gradient: its start, and a view of its elements."""
        buffers = []
        for slices in gradient_slices(self._zero):
            ends = list(accumulate(tensor.numel() for tensor in slices))
            buffers.append((slices, [0, *ends]))
        found = {}
        for parameter, local in self._ranges.items():
            if not local.length:
                continue
            slices, begins = buffers[local.flat]
            # DeepSpeed's slices follow each other without gaps, so the last one that begins at or before the
            # offset holds the range. An index past the end means that the group has no gradient.
            index = bisect_right(begins, local.offset) - 1
            if index < len(slices):
                flat = slices[index].detach().view(-1)
                found[parameter] = local.start, flat.narrow(0, local.offset - begins[index], local.length)
        return found

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zero gradients that earlier steps may have left for these parameters."""
        shards = self.gradient_shards() if parameters else {}
        for parameter in parameters:
            if parameter in shards:
                shards[parameter][1].zero_()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that have masters."""
        return iter(self._flat_of)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _is_flat(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _replicated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return Shard(tuple(value.shape), value.dtype, (Box.whole(tuple(value.shape)),), (value.detach(),))


def _set_shared(state: dict[str, Any], name: str, value: Any, *, as_number: bool) -> None:
    value = int(_read(value)) if as_number else _read(value)
    if name not in state:
        state[name] = value
        return
    mine = state[name]
    same = torch.equal(mine, value) if isinstance(mine, Tensor) else mine == value
    if not same:
        raise CheckpointError(
            f"parameters of one param group have different {name!r} in the checkpoint: {mine} and {value}.",
            remedy="DeepSpeed keeps one value for the group: resume under another strategy, or load weights.",
        )


def _read(value: Any) -> Any:
    """Return a small value of a checkpoint, and read it first if it is a handle."""
    stored = getattr(value, "stored", None)
    if stored is None:
        return value.detach().clone() if isinstance(value, Tensor) else value
    return stored.read(value.key, Box.whole(tuple(value.shape)))


# User code sees full parameters under stage 3.
#
# A parameter is sharded outside the forward and backward of its layers, and core's guard stands in for it.
# The first access by user code gathers the parameter: a computation, a read of its data, or a write. The
# parameter stays gathered until the step continues, and the step then copies written values. A gather is
# collective, so every rank must access the parameter.
# DeepSpeed's own code must see shards, so its entry points run in local mode (`show_partitions`).


class ShardedParameter(Part):
    """The guard's view of a stage 3 parameter, which unshards the parameter in place.

    Args:
        parameter: A parameter that DeepSpeed has sharded.
    """

    is_copied_as_stored = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = self._parameter = parameter

    @property
    def description(self) -> Tensor:  # noqa: D102 # as the base says
        with local_mode():
            return torch.empty(_shape(self._parameter), dtype=self._parameter.dtype, device="meta")

    def unsharded(self) -> Tensor:  # noqa: D102
        gather_for_user([self._parameter])
        return self._parameter  # the guard gives it its own class until it is sharded again

    def value(self) -> Tensor:  # noqa: D102
        return self.unsharded()

    def flush(self) -> None:
        """Do nothing: `release_touched` copies written values."""

    def assign(self, values: Tensor) -> None:  # noqa: D102
        gather_for_user([self._parameter])
        self._parameter.data = values

    def gradient_shown(self) -> Tensor | None:  # noqa: D102
        with local_mode():
            return self._parameter.grad

    def gradient_given(self, gradient: Any) -> None:  # noqa: D102
        assign_gradient(self._parameter, gradient)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:  # noqa: D102
        with local_mode():
            return register(self._parameter, hook)

    def attributes(self) -> dict[str, Any]:
        """Return nothing: a copy of the parameter has none of DeepSpeed's groups and methods."""
        return {}


def assign_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``p.grad``, also for a sharded parameter or a gradient of another dtype.

    torch compares the gradient's shape and dtype with the parameter's. So the parameter takes the gradient's
    shape while ``p.grad`` is set, in an expanded tensor without memory of its own.
    """
    with local_mode():
        parameter.grad = None  # the old gradient may have another dtype than the next `grad_dtype`
        if gradient is None:
            return
        present = parameter.data
        parameter.data = present.new_empty(()).expand(gradient.shape)
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        parameter.data = present


# User code sees full gradients in ``p.grad``, as PyTorch shows them.
#
# DeepSpeed keeps the reduced gradients in flat partitions. `show` gathers them before code that may read
# them, and `write_back` copies them into the partitions before the step, because user code may have
# changed them. Gradients stay visible after the step until user code drops them, and another backward adds
# to them, as on a single device.


class FlatGradients:
    """Watches what the steps of an optimizer do to the gradients of flat partitions, in a context.

    Args:
        optimizer: The optimizer that DeepSpeed steps, once for each flat partition or once for all.

    Attributes:
        dropped: The flat partitions whose gradient a step has set to None.
        written: Those whose gradient a step has changed in place or replaced.
        after: The gradients after the step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, tuple[Tensor, int]] = {}
        self.dropped: set[Tensor] = set()
        self.written: set[Tensor] = set()
        self.after: dict[Tensor, Tensor] = {}

    def __enter__(self) -> FlatGradients:
        self._handles = [
            self._optimizer.register_step_pre_hook(self._note),
            self._optimizer.register_step_post_hook(self._compare),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        for flat in _flats_of(optimizer):
            if flat.grad is not None:
                self._before[flat] = flat.grad, flat.grad._version

    def _compare(self, optimizer: Optimizer, *_: Any) -> None:
        for flat in _flats_of(optimizer):
            if flat not in self._before:
                continue
            before, version = self._before.pop(flat)
            if flat.grad is None:
                self.dropped.add(flat)
                continue
            self.after[flat] = flat.grad
            if flat.grad is not before or before._version != version:
                self.written.add(flat)


def _flats_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_CHUNK_ELEMENTS = 2**24
"""Elements gathered in one collective, which bounds the memory of the flat buffer."""


class GatheredGradients:
    """The full gradients of a module that DeepSpeed trains, in ``p.grad`` where user code reads them.

    Args:
        partitions: The partitions that hold DeepSpeed's reduced gradients.
        device: The device of the module.

    Attributes:
        are_shown: True while ``p.grad`` holds the gradients.
    """

    def __init__(self, partitions: Partitions, *, device: torch.device) -> None:
        self._partitions = partitions
        self._device = device
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self.are_shown = False

    @torch.no_grad()
    def show(self, unused: Collection[nn.Parameter]) -> None:
        """Gather the reduced gradients into ``p.grad``. Collective.

        Gradients that user code left there are added.

        Args:
            unused: The parameters without a gradient.
        """
        for parameter, gradient in self._gather(self._partitions.gradient_shards(), unused):
            earlier = self._earlier.pop(parameter, None)
            assign_gradient(parameter, gradient if earlier is None else earlier.add_(gradient))
        self.are_shown = True

    def hide(self) -> Collection[nn.Parameter]:
        """Take the visible gradients out of ``p.grad`` before a backward; `show` adds them afterwards.

        Returns:
            The parameters with a gradient.
        """
        self._earlier = self._take()
        self.are_shown = False
        return self._earlier.keys()

    @torch.no_grad()
    def write_back(self) -> dict[nn.Parameter, Tensor] | None:
        """Copy the gradients that user code left into the partitions, before the step.

        Returns:
            The visible gradients, for `show_again`. None if every gradient is None, because such a step
            changes nothing.
        """
        left = self._take()
        if self.are_shown and not left:
            return None  # user code set every gradient to None
        shards = self._partitions.gradient_shards() if left or self._earlier else {}
        for parameter, (start, shard) in shards.items():
            if parameter in left:
                shard.copy_(left[parameter].reshape(-1).narrow(0, start, shard.numel()))
            elif parameter in self._earlier:  # hidden by a backward, and not shown since
                earlier = self._earlier[parameter].reshape(-1)
                shard.add_(earlier.narrow(0, start, shard.numel()))
        self._earlier = {}
        return left

    @torch.no_grad()
    def after_step(
        self, gradients: dict[nn.Parameter, Tensor], flats: FlatGradients
    ) -> dict[nn.Parameter, Tensor]:
        """Return gradients as a step on flat partitions has left them, without dropped ones. Collective.

        Args:
            gradients: The visible gradients before the step, the same parameters on every rank.
            flats: What the step did to the gradients of this rank's flat partitions.
        """
        flat_of = {parameter: self._partitions.flat_of(parameter) for parameter in gradients}
        left = {p: gradient for p, gradient in gradients.items() if flat_of[p] not in flats.dropped}
        is_written = used_anywhere([flat_of[parameter] in flats.written for parameter in left])
        unwritten = [p for p, written in zip(left, is_written, strict=True) if not written]
        if len(unwritten) < len(left):
            others = [p for p in self._partitions.parameters() if p not in left]
            left.update(self._gather(self._partitions.shards_of(flats.after), [*others, *unwritten]))
        return left

    def show_again(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Put gradients back into ``p.grad`` after the step, where they stay until user code drops them."""
        for parameter, gradient in gradients.items():
            assign_gradient(parameter, gradient)

    def forget(self) -> None:
        """Drop all gradients."""
        self._take()
        self._earlier = {}
        self.are_shown = False

    def _take(self) -> dict[nn.Parameter, Tensor]:
        if not self.are_shown:
            return {}
        taken = {}
        for parameter in self._partitions.parameters():
            if parameter.grad is not None:
                taken[parameter] = parameter.grad
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
        return taken

    def _gather(
        self, shards: Mapping[nn.Parameter, tuple[int, Tensor]], unused: Collection[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for chunk in self._chunks(set(unused)):
            sizes = [self._partitions.shape(parameter).numel() for parameter in chunk]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
            gathered = torch.split(flat, sizes)
            for parameter, full in zip(chunk, gathered, strict=True):
                if parameter in shards:
                    start, shard = shards[parameter]
                    full.narrow(0, start, shard.numel()).copy_(shard)
            if dist.get_world_size() > 1:
                # Exact: one rank holds each element and the others add zeros. One collective for many
                # parameters also works where a rank holds no range of some of them.
                dist.all_reduce(flat)
            for parameter, full in zip(chunk, gathered, strict=True):
                yield parameter, full.view(self._partitions.shape(parameter))

    def _chunks(self, unused: Collection[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        held = 0
        for parameter in self._partitions.parameters():
            if parameter in unused:
                continue
            numel = self._partitions.shape(parameter).numel()
            if chunk and held + numel > _CHUNK_ELEMENTS:
                yield chunk
                chunk, held = [], 0
            chunk.append(parameter)
            held += numel
        if chunk:
            yield chunk
