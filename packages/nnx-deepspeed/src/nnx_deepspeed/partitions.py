"""What this rank holds under ZeRO: masters, optimizer state and gradients, as views of DeepSpeed's buffers.

Stages 1 and 2 cut a param group as one flat vector, so a rank may hold the end of one parameter and the
beginning of the next. Stage 3 cuts every parameter into equal parts, the last one padded. Either way a part
is a range of a flattened parameter, which is what `nnx_base.shard.shard_of_range` describes.

User code sees none of this: to it parameters (`CutParameter`) and gradients (`WholeGradients`) are whole.
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
from nnx_core.errors import CheckpointError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.view.guard import Part
from nnx_deepspeed._deepspeed_compat import (
    fragment,
    gather_for_user,
    gradient_pieces,
    local_partition,
    own_range,
    position,
    trainable_groups,
)
from nnx_deepspeed._operators_compat import counts_by_number

# Parameters that do not train, as exact as they were before DeepSpeed rounded them to 16 bits.
#
# DeepSpeed keeps float32 masters of what it trains. Of the others each rank keeps a part here, in host
# memory: checkpoints are made of it, and the module gets it back.


class FrozenValues:
    """This rank's parts of the exact values.

    Args:
        exact: All values as they were before DeepSpeed's engine was made; those that it rounded are kept.
    """

    def __init__(self, exact: Mapping[nn.Parameter, Tensor]) -> None:
        self._parts: dict[nn.Parameter, Tensor] = {}
        for parameter, value in exact.items():
            if not parameter.requires_grad and parameter.dtype != value.dtype:
                start, weights = own_range(parameter)
                part = value.flatten()[start : start + weights.numel()]
                self._parts[parameter] = part.to("cpu", copy=True)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parts

    def shard(self, parameter: nn.Parameter, shape: torch.Size) -> Shard:
        """This rank's part; writing into it counts after `reload`."""
        return shard_of_range(self._parts[parameter], shape=shape, start=own_range(parameter)[0])

    def follow(self) -> None:
        """Take over what was written into the weights."""
        for parameter, part in self._parts.items():
            follow(part, own_range(parameter)[1])

    def reload(self) -> None:
        """Round the parts into the weights. Collective where these are whole on every rank."""
        for parameter, part in self._parts.items():
            _, weights = own_range(parameter)
            if not hasattr(parameter, "ds_tensor"):
                others = parameter.detach().zero_()
                weights.copy_(part)
                dist.all_reduce(others)  # every element lies on one rank; adding zeros changes none
            else:
                weights.copy_(part)


_AT_ONCE = 1 << 24
"""Elements whose rounded copies are made at a time."""


def were_written(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether any weights are something else than their masters, rounded. The host waits for this once.

    Args:
        pairs: Flat weights and their masters.
    """
    differ: dict[torch.device, Tensor] = {}
    for weights, masters in pairs:
        if masters.data_ptr() == weights.data_ptr():
            continue
        for part, of_masters in zip(*(torch.split(t, _AT_ONCE) for t in (weights, masters)), strict=True):
            there = of_masters.device
            found = (of_masters.to(part.dtype) != part.to(there)).any()
            differ[there] = differ[there] | found if there in differ else found
    return any(bool(found) for found in differ.values())


def follow(masters: Tensor, weights: Tensor) -> None:
    """Take over the weights that are not the masters, rounded. Both are flat, and may be one."""
    if masters.data_ptr() == weights.data_ptr():
        return
    if masters.dtype == weights.dtype:
        masters.copy_(weights)
        return
    for part, of_weights in zip(*(torch.split(t, _AT_ONCE) for t in (masters, weights)), strict=True):
        there = of_weights.to(part.device)
        torch.where(part.to(there.dtype) == there, part, there.to(part.dtype), out=part)


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements ``[start, start + length)`` of a parameter; they begin at `offset` of partition `flat`.

    Where this rank holds none of a parameter all but `flat` is 0.
    """

    flat: int
    start: int
    offset: int
    length: int


class Partitions:
    """Where every parameter of a module lies.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        rank: This rank.
        module: The module.
        frozen: The exact values of what does not train.

    Attributes:
        frozen: The same.
        missed: The number of steps of its group a parameter took no part in, of those that missed any.
    """

    def __init__(self, zero: Any, *, rank: int, module: nn.Module, frozen: FrozenValues) -> None:
        self.frozen = frozen
        self._zero = zero
        self._rank = rank
        self._is_stage_3 = hasattr(zero, "fp16_groups")
        self._shapes = {parameter: _shape(parameter) for parameter in module.parameters()}
        groups = trainable_groups(zero)
        self._flats = [flat for _, flat in groups]
        self._parts: dict[nn.Parameter, _Part] = {}
        self._flat_of: dict[nn.Parameter, int] = {}
        self.missed: dict[nn.Parameter, int] = {}
        for index, (parameters, _) in enumerate(groups):
            for parameter in parameters:
                self._flat_of[parameter] = index
                self._parts[parameter] = self._part(parameter, index)
        self._unstepped = set(self._flat_of)

    def _part(self, parameter: nn.Parameter, flat: int) -> _Part:
        if not self._is_stage_3:
            return _Part(flat, *(fragment(parameter) or (0, 0, 0)))
        offset, padded = position(self._zero, parameter)
        low, numel = self._rank * padded, self._shapes[parameter].numel()
        start, length = cut_range(0, numel, low=low, high=low + padded)
        return _Part(flat, start, offset if length else 0, length)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """The whole parameter's, which stage 3 empties between steps."""
        return self._shapes[parameter]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._shapes

    def shard_like(self, parameter: nn.Parameter, tensor: Tensor) -> Shard:
        """Describe a tensor that has a parameter's form between steps: whole, or in stage 3 a flat part."""
        shape = self._shapes[parameter]
        if tensor.shape == shape or not self._is_stage_3:
            return shard_of(tensor)
        if not tensor.numel() or not shape.numel():  # DeepSpeed pads parameters without elements to one
            return Shard(tuple(shape), tensor.dtype, (), ())
        return shard_of_range(tensor.detach(), shape=shape, start=self._rank * self._padded(parameter))

    def _padded(self, parameter: nn.Parameter) -> int:
        return local_partition(parameter).numel()

    def master(self, parameter: nn.Parameter) -> Shard:
        """This rank's part of a parameter's master weights; of a frozen one, of its weights."""
        if parameter in self._flat_of:
            return self._shard(parameter, self._flats[self._flat_of[parameter]])
        if parameter in self.frozen:
            return self.frozen.shard(parameter, self._shapes[parameter])
        if not self._is_stage_3:
            return shard_of(parameter)
        start, held = own_range(parameter)
        return shard_of_range(held.flatten(), shape=self._shapes[parameter], start=start)

    def take_exact(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Begin with masters that are as exact as what DeepSpeed has rounded."""
        for parameter, value in values.items():
            if parameter.requires_grad:
                self.master(parameter).fill_from(value)

    @property
    def cuts_each_parameter(self) -> bool:
        """True if each parameter lies in parts on the ranks, as in stage 3."""
        return self._is_stage_3

    def is_cut(self, parameter: nn.Parameter) -> bool:
        """Return True if ranks hold different parts of it; the same answer on all of them."""
        return self._is_stage_3 or parameter in self._flat_of or parameter in self.frozen

    def _shard(self, parameter: nn.Parameter, flat: Tensor) -> Shard:
        part = self._parts[parameter]
        held = flat.detach().narrow(0, part.offset, part.length)
        return shard_of_range(held, shape=self._shapes[parameter], start=part.start)

    def state(self, parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of a parameter's optimizer state, by name; other values are the whole group's."""
        if parameter not in self._flat_of or self._has_no_state(parameter):
            return {}
        flat = self._flats[self._flat_of[parameter]]
        held = dict(optimizer.state.get(flat, {}))
        if "step" in held:
            held["step"] = self._own_count(parameter, held["step"])
        if "step" in held and counts_by_number(optimizer):
            held["step"] = torch.tensor(float(held["step"]))  # as torch's optimizers have it
        return {
            name: self._shard(parameter, value) if _is_laid_out(value, flat) else _whole(value)
            for name, value in held.items()
        }

    def range_of(self, parameter: nn.Parameter) -> tuple[Tensor, int, int] | None:
        """The flat partition with this rank's part, where it begins there, and its length."""
        part = self._parts[parameter]
        return (self._flats[part.flat], part.offset, part.length) if part.length else None

    def count_step(self, unused: Sequence[nn.Parameter]) -> None:
        """A step was made that left some parameters alone."""
        for parameter in unused:
            self.missed[parameter] = self.missed.get(parameter, 0) + 1
        if self._unstepped:
            self._unstepped.intersection_update(unused)

    def _has_no_state(self, parameter: nn.Parameter) -> bool:
        return parameter in self.missed and parameter in self._unstepped

    def _own_count(self, parameter: nn.Parameter, count: Any) -> Any:
        missed = self.missed.get(parameter, 0)
        return count - missed if missed else count

    def allocate(self, saved: Mapping[nn.Parameter, Mapping[str, Any]], optimizer: Optimizer) -> None:
        """Make room for state, and take over what does not go by element, such as ``step``.

        Args:
            saved: The state of each parameter by name: tensors or handles with ``shape`` and ``dtype``.
            optimizer: The one whose state is keyed by flat partitions.

        Raises:
            CheckpointError: Parameters of one group differ in such a value; DeepSpeed has one for all.
        """
        optimizer.state.clear()
        self._unstepped = {p for p in self._flat_of if not saved.get(p)}
        counts = counts_by_number(optimizer)
        for parameter, entries in saved.items():
            flat = self._flats[self._flat_of[parameter]]
            state = optimizer.state[flat]
            for name, value in entries.items():
                if not self._goes_by_element(parameter, name, value):
                    _take_over(state, name, value, as_number=counts and name == "step")
                elif name not in state:
                    state[name] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
        self.missed = {}
        for parameter in self._unstepped:
            beside = optimizer.state.get(self._flats[self._flat_of[parameter]])
            if beside and self._shapes[parameter].numel():
                self.missed[parameter] = int(beside.get("step", 1))

    def _goes_by_element(self, parameter: nn.Parameter, name: str, value: Any) -> bool:
        shape = getattr(value, "shape", None)
        if shape is None or name == "step":
            return False
        return tuple(shape) in (tuple(self._shapes[parameter]), (self._parts[parameter].length,))

    @torch.no_grad()
    def take_state(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Begin with the user's optimizer's state: of whole parameters, or what `leave_state` left."""
        held = {p: dict(optimizer.state.pop(p)) for p in self._flat_of if p in optimizer.state}
        self.allocate(held, shadow)
        for parameter, entries in held.items():
            mine = self.state(parameter, shadow)
            for name, value in entries.items():
                if not self._goes_by_element(parameter, name, value):
                    continue
                if tuple(value.shape) == tuple(self._shapes[parameter]):
                    mine[name].fill_from(value)
                else:
                    start = self._parts[parameter].start
                    part = shard_of_range(value, shape=self._shapes[parameter], start=start)
                    for into, view in zip(mine[name].data, part.data, strict=True):
                        into.copy_(view)

    @torch.no_grad()
    def leave_state(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Give the user's optimizer its state, whole and in host memory. Collective."""
        for parameter in self._flat_of:
            if self._has_no_state(parameter):
                continue
            flat = self._flats[self._flat_of[parameter]]
            for name, value in shadow.state.get(flat, {}).items():
                if not _is_laid_out(value, flat):
                    own = self._own_count(parameter, value) if name == "step" else value
                    optimizer.state[parameter][name] = own.clone() if isinstance(own, Tensor) else own
                    continue
                optimizer.state[parameter][name] = self._whole_state(parameter, value).cpu()

    def _whole_state(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        shape, part = self._shapes[parameter], self._parts[parameter]
        whole = torch.zeros(shape.numel(), dtype=value.dtype, device=parameter.device)
        whole.narrow(0, part.start, part.length).copy_(value.narrow(0, part.offset, part.length))
        if dist.get_world_size() > 1:
            dist.all_reduce(whole)  # every element lies on one rank; adding zeros changes none
        return whole.view(shape)

    def gradients(self) -> list[Gradient]:
        """What this rank holds of the reduced gradients, between the last backward and the step."""
        return [Gradient(piece, replicas=1) for pieces in gradient_pieces(self._zero) for piece in pieces]

    def gradient_parts(self) -> dict[nn.Parameter, tuple[int, Tensor]]:
        """This rank's part of each parameter's reduced gradient: where it begins, and a view on it."""
        places = []
        for pieces in gradient_pieces(self._zero):
            ends = list(accumulate(piece.numel() for piece in pieces))
            places.append((pieces, [0, *ends]))
        found = {}
        for parameter, part in self._parts.items():
            if not part.length:
                continue
            pieces, begins = places[part.flat]
            index = bisect_right(begins, part.offset) - 1
            if index < len(pieces):
                piece = pieces[index].detach().view(-1)
                found[parameter] = part.start, piece.narrow(0, part.offset - begins[index], part.length)
        return found

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zero what earlier steps may have left for these."""
        parts = self.gradient_parts() if parameters else {}
        for parameter in parameters:
            if parameter in parts:
                parts[parameter][1].zero_()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter that has masters."""
        return iter(self._flat_of)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _is_laid_out(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return Shard(tuple(value.shape), value.dtype, (Box.whole(tuple(value.shape)),), (value.detach(),))


def _take_over(state: dict[str, Any], name: str, value: Any, *, as_number: bool) -> None:
    value = int(_read(value)) if as_number else _read(value)
    if name not in state:
        state[name] = value
        return
    mine = state[name]
    same = torch.equal(mine, value) if isinstance(mine, Tensor) else mine == value
    if not same:
        raise CheckpointError(
            f"parameters of one param group have different {name!r} in the checkpoint: {mine} and {value}.",
            remedy="DeepSpeed keeps one for all of them: resume under another strategy, or load weights.",
        )


def _read(value: Any) -> Any:
    """A small value out of a checkpoint: a handle is read now."""
    stored = getattr(value, "stored", None)
    if stored is None:
        return value.detach().clone() if isinstance(value, Tensor) else value
    return stored.read(value.key, Box.whole(tuple(value.shape)))


# Parameters of stage 3 as user code sees them: whole, from the first touch on.
#
# Outside of its layers' forward and backward a parameter is cut: a rank holds a flat part of it. Meanwhile
# core's guard answers for it. When user code computes with it, reads its data or writes into it, it is
# gathered and stays whole until the step goes on, which takes what was written. All ranks must do so.
# DeepSpeed's code runs in local mode from where it is entered (`show_partitions`), and so does ours.


class CutParameter(Part):
    """What is known of a parameter of stage 3: its own object becomes the whole.

    Args:
        parameter: One that DeepSpeed has cut.
    """

    is_copied_as_stored = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = self._parameter = parameter

    @property
    def description(self) -> Tensor:  # noqa: D102 # as the base says
        with local_mode():
            return torch.empty(_shape(self._parameter), dtype=self._parameter.dtype, device="meta")

    def whole(self) -> Tensor:  # noqa: D102
        gather_for_user([self._parameter])
        return self._parameter  # which has its own class until it is cut again

    def value(self) -> Tensor:  # noqa: D102
        return self.whole()

    def flush(self) -> None:
        """Do nothing: `release_touched` takes what was written."""

    def assign(self, whole: Tensor) -> None:  # noqa: D102
        gather_for_user([self._parameter])
        self._parameter.data = whole

    def gradient_shown(self) -> Tensor | None:  # noqa: D102
        with local_mode():
            return self._parameter.grad

    def gradient_given(self, gradient: Any) -> None:  # noqa: D102
        assign_gradient(self._parameter, gradient)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:  # noqa: D102
        with local_mode():
            return register(self._parameter, hook)

    def attributes(self) -> dict[str, Any]:
        """Nothing, as of a copy of torch's own: DeepSpeed attaches its groups and methods."""
        return {}


def assign_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``p.grad``, also where the parameter is a part or has another dtype than the gradient."""
    with local_mode():
        parameter.grad = None  # before it may be of another dtype
        if gradient is None:
            return
        present = parameter.data
        parameter.data = present.new_empty(()).expand(gradient.shape)
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        parameter.data = present


# Gradients as PyTorch has them, whole and in ``p.grad``, while user code may look at them.
#
# DeepSpeed keeps the reduced gradients in flat partitions. They are gathered from there where somebody may
# look (`show`), and what user code left is written back before the step (`write_back`). From then on until
# they are dropped, gradients stay visible, and another backward adds to them, as in one process.


_ELEMENTS_AT_ONCE = 2**24
"""How many elements are gathered in one collective."""


class WholeGradients:
    """The gradients of a module that DeepSpeed trains, as user code sees them.

    Args:
        partitions: The partitions in which DeepSpeed keeps them.
        device: The device of the module.
    """

    def __init__(self, partitions: Partitions, *, device: torch.device) -> None:
        self._partitions = partitions
        self._device = device
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self.are_shown = False

    @torch.no_grad()
    def show(self, unused: Collection[nn.Parameter]) -> None:
        """Put the reduced gradients into ``p.grad``, added to what user code left there. Collective.

        Args:
            unused: The parameters that have none.
        """
        for parameter, gradient in self._gather(unused):
            earlier = self._earlier.pop(parameter, None)
            assign_gradient(parameter, gradient if earlier is None else earlier.add_(gradient))
        self.are_shown = True

    def put_aside(self) -> Collection[nn.Parameter]:
        """Before a backward: take the visible gradients away; they count again when it is over.

        Returns:
            The parameters that have one.
        """
        self._earlier = self._take()
        self.are_shown = False
        return self._earlier.keys()

    @torch.no_grad()
    def write_back(self) -> dict[nn.Parameter, Tensor] | None:
        """Before the step: give the partitions what user code left.

        Returns:
            What was visible, for `show_again`; None where every gradient is None, with which no step changes
            anything.
        """
        left = self._take()
        if self.are_shown and not left:
            return None
        parts = self._partitions.gradient_parts() if left or self._earlier else {}
        for parameter, (start, part) in parts.items():
            if parameter in left:
                part.copy_(left[parameter].reshape(-1).narrow(0, start, part.numel()))
            elif parameter in self._earlier:
                earlier = self._earlier[parameter].reshape(-1)
                part.add_(earlier.narrow(0, start, part.numel()))
        self._earlier = {}
        return left

    def show_again(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """After the step: gradients stay where they are until somebody drops them."""
        for parameter, gradient in gradients.items():
            assign_gradient(parameter, gradient)

    def forget(self) -> None:
        """Drop them."""
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

    def _gather(self, unused: Collection[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = self._partitions.gradient_parts()
        for chunk in self._chunks(set(unused)):
            sizes = [self._partitions.shape(parameter).numel() for parameter in chunk]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
            wholes = torch.split(flat, sizes)
            for parameter, whole in zip(chunk, wholes, strict=True):
                if parameter in parts:
                    start, part = parts[parameter]
                    whole.narrow(0, start, part.numel()).copy_(part)
            if dist.get_world_size() > 1:
                dist.all_reduce(flat)  # every element lies on one rank; adding zeros changes none
            for parameter, whole in zip(chunk, wholes, strict=True):
                yield parameter, whole.view(self._partitions.shape(parameter))

    def _chunks(self, unused: Collection[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        held = 0
        for parameter in self._partitions.parameters():
            if parameter in unused:
                continue
            numel = self._partitions.shape(parameter).numel()
            if chunk and held + numel > _ELEMENTS_AT_ONCE:
                yield chunk
                chunk, held = [], 0
            chunk.append(parameter)
            held += numel
        if chunk:
            yield chunk
