"""What this rank holds under ZeRO: masters, optimizer state and gradients, as views of DeepSpeed's buffers.

Stages 1 and 2 cut a param group as one flat vector, so a rank may hold the end of one parameter and the
beginning of the next. Stage 3 cuts every parameter into equal parts, the last one padded. Either way a part
is a range of a flattened parameter, which is what `nnx.layout.shard_of_range` describes. Nothing here
communicates or copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.errors import CheckpointError
from nnx.gradients import Gradient
from nnx.layout import Box, Shard, shard_of, shard_of_range
from nnx_deepspeed._deepspeed_compat import (
    fragment,
    gradient_tensors,
    local_partition,
    position,
    trainable_groups,
)
from nnx_deepspeed._deepspeed_operators import counts_by_number

__all__ = ["Partitions"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements ``[start, start + length)`` of a parameter; they begin at `offset` of partition `flat`."""

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
    """

    def __init__(self, zero: Any, *, rank: int, module: nn.Module) -> None:
        self._zero = zero
        self._rank = rank
        self._is_stage_3 = hasattr(zero, "fp16_groups")
        self._shapes = {parameter: _shape(parameter) for parameter in module.parameters()}
        groups = trainable_groups(zero)
        self._flats = [flat for _, flat in groups]
        self._parts: dict[nn.Parameter, _Part | None] = {}
        self._flat_of: dict[nn.Parameter, int] = {}
        for index, (parameters, _) in enumerate(groups):
            for parameter in parameters:
                self._flat_of[parameter] = index
                self._parts[parameter] = self._part(parameter, index)

    def _part(self, parameter: nn.Parameter, flat: int) -> _Part | None:
        if self._is_stage_3:
            offset, padded = position(self._zero, parameter)
            start = self._rank * padded
            length = min(padded, self._shapes[parameter].numel() - start)
            return _Part(flat, start, offset, length) if length > 0 else None
        found = fragment(parameter)
        return None if found is None else _Part(flat, *found)

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
        if not tensor.numel():
            return Shard(tuple(shape), tensor.dtype, (), ())
        return shard_of_range(tensor.detach(), shape=shape, start=self._rank * self._padded(parameter))

    def _padded(self, parameter: nn.Parameter) -> int:
        return local_partition(parameter).numel()

    # --- weights ------------------------------------------------------------------------------

    def master(self, parameter: nn.Parameter) -> Shard:
        """This rank's part of a parameter's master weights; of a frozen one, of its weights."""
        if parameter in self._flat_of:
            return self._shard(parameter, self._flats[self._flat_of[parameter]])
        if not self._is_stage_3:
            return shard_of(parameter)
        shape, local = self._shapes[parameter], local_partition(parameter).flatten()
        start = self._rank * local.numel()
        length = max(0, min(local.numel(), shape.numel() - start))
        if not length:
            return Shard(tuple(shape), local.dtype, (), ())
        return shard_of_range(local[:length], shape=shape, start=start)

    def is_cut(self, parameter: nn.Parameter) -> bool:
        """Whether ranks hold different parts of it; the same answer on all of them."""
        return self._is_stage_3 or parameter in self._flat_of

    def _shard(self, parameter: nn.Parameter, flat: Tensor) -> Shard:
        shape, part = self._shapes[parameter], self._parts[parameter]
        if part is None:
            return Shard(tuple(shape), flat.dtype, (), ())
        piece = flat.detach().narrow(0, part.offset, part.length)
        return shard_of_range(piece, shape=shape, start=part.start)

    # --- optimizer state ----------------------------------------------------------------------

    def state(self, parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of a parameter's optimizer state, by name; other values are the whole group's."""
        if parameter not in self._flat_of:
            return {}
        flat = self._flats[self._flat_of[parameter]]
        held = dict(optimizer.state.get(flat, {}))
        if "step" in held and counts_by_number(optimizer):
            held["step"] = torch.tensor(float(held["step"]))  # as torch's optimizers have it
        return {
            name: self._shard(parameter, value) if _is_laid_out(value, flat) else _whole(value)
            for name, value in held.items()
        }

    def allocate(self, saved: Mapping[nn.Parameter, Mapping[str, Any]], optimizer: Optimizer) -> None:
        """Make room for state, and take over what does not go by element, such as ``step``.

        Args:
            saved: For each parameter, its state by name: tensors or handles with ``shape`` and ``dtype``.
            optimizer: The one whose state is keyed by flat partitions.

        Raises:
            CheckpointError: Parameters of one group differ in such a value; DeepSpeed has one for all.
        """
        optimizer.state.clear()
        counts = counts_by_number(optimizer)
        for parameter, entries in saved.items():
            flat = self._flats[self._flat_of[parameter]]
            state = optimizer.state[flat]
            for name, value in entries.items():
                if not self._goes_by_element(parameter, name, value):
                    _take_over(state, name, value, as_number=counts and name == "step")
                elif name not in state:
                    state[name] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)

    def _goes_by_element(self, parameter: nn.Parameter, name: str, value: Any) -> bool:
        shape = getattr(value, "shape", None)
        if shape is None or name == "step":
            return False
        return tuple(shape) in (tuple(self._shapes[parameter]), (self._length(parameter),))

    def _length(self, parameter: nn.Parameter) -> int:
        part = self._parts[parameter]
        return 0 if part is None else part.length

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
                    part = shard_of_range(value, shape=self._shapes[parameter], start=self._start(parameter))
                    for into, view in zip(mine[name].data, part.data, strict=True):
                        into.copy_(view)

    def _start(self, parameter: nn.Parameter) -> int:
        part = self._parts[parameter]
        return 0 if part is None else part.start

    def leave_state(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Give the user's optimizer this rank's part of its state, flat, for another run of these ranks."""
        for parameter in self._flat_of:
            flat, part = self._flats[self._flat_of[parameter]], self._parts[parameter]
            offset, length = (part.offset, part.length) if part is not None else (0, 0)
            for name, value in shadow.state.get(flat, {}).items():
                cut = _is_laid_out(value, flat)
                optimizer.state[parameter][name] = value.narrow(0, offset, length).clone() if cut else value

    # --- gradients ----------------------------------------------------------------------------

    def gradients(self) -> list[Gradient]:
        """What this rank holds of the reduced gradients, between the last backward and the step."""
        return [Gradient(tensor, replicas=1) for tensor in gradient_tensors(self._zero)]

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
