"""Define placements of a tensor over a group of ranks, and the collectives that convert them.

``R``: every rank holds the tensor. ``P``: every rank holds a summand of it. ``S(dim, groups)``: the dim is
viewed as ``(groups, size / groups)`` and split evenly along the second factor, so that ``groups=3`` splits a
fused query-key-value projection by heads. A negative dim is not allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nnx_base.box import Box

_SHARD = re.compile(r"S\((\d+)(?:, ?(\d+))?\)")


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The placement of a tensor over a group of ranks; `R`, `P` and `S` make one.

    Attributes:
        kind: ``"R"`` replicated, ``"P"`` partial sums, ``"S"`` sharded.
        dim: The sharded tensor dim; 0 unless sharded.
        groups: The number of equal groups, each of which is sharded; 1 for a plain shard.

    Example:
        >>> str(S(1, groups=3)), Placement.parse("S(1,3)") == S(1, groups=3)
        ('S(1,3)', True)
    """

    kind: Literal["R", "P", "S"]
    dim: int = 0
    groups: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.groups == 1 else f"S({self.dim},{self.groups})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse the text that `str` returns for a placement.

        Raises:
            ValueError: The text is no placement.
        """
        if text in ("R", "P"):
            return R if text == "R" else P
        found = _SHARD.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a placement: expected 'R', 'P', 'S(dim)' or 'S(dim,groups)'")
        return S(int(found[1]), groups=int(found[2] or 1))

    @property
    def is_shard(self) -> bool:
        """True if each rank holds a shard of the elements."""
        return self.kind == "S"

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the local shape of a tensor on each of `size` ranks.

        Example:
            >>> S(0).local_shape((6, 4), 2)
            (3, 4)
        """
        if not self.is_shard:
            return tuple(shape)
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Return True if a tensor of this shape can be sharded evenly over `size` ranks."""
        return not self.is_shard or (self.dim < len(shape) and shape[self.dim] % (size * self.groups) == 0)

    def boxes(self, shape: Sequence[int], *, rank: int, size: int) -> tuple[Box, ...]:
        """Return the boxes of a rank's local tensor, one for each group, in the local tensor's order.

        Example:
            >>> S(0, groups=2).boxes((8,), rank=1, size=2)
            (Box(offset=(2,), size=(2,)), Box(offset=(6,), size=(2,)))
        """
        if not self.is_shard:
            return (Box.whole(shape),)
        extent = shape[self.dim] // self.groups // size
        starts = [group * extent * size + rank * extent for group in range(self.groups)]
        boxes = []
        for start in starts:
            offset = tuple(start if dim == self.dim else 0 for dim in range(len(shape)))
            boxes.append(Box(offset, tuple(extent if d == self.dim else s for d, s in enumerate(shape))))
        return tuple(boxes)


R = Placement("R")


P = Placement("P")


def S(dim: int, *, groups: int = 1) -> Placement:  # noqa: N802 # the field writes it so
    """Return the placement that is sharded along a tensor dim."""
    return Placement("S", dim, groups)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator on a group of ranks.

    The placements of gradients follow: ``S`` has a gradient ``S``, and ``P`` or ``R`` have a complete one.
    One exception: an ``R`` operand of an operator that is not replicated gets a partial gradient.

    Attributes:
        name: The name in explanations: ``"replicate"``, ``"batch"``, ``"column"``, ``"row"``...
        inputs: The placement of every tensor operand, in the order of `Op.operands`.
        outputs: The placement of every result.
        call: The name of the function in `nnx_nnscaler.runtime.functions` that replaces the operator; empty
            if the operator itself is right on local tensors.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    call: str = ""

    @property
    def is_replicated(self) -> bool:
        """True if every rank runs the complete operator."""
        return all(placement == R for placement in (*self.inputs, *self.outputs))


class Use(NamedTuple):
    """The use of an operand by a consumer.

    Attributes:
        placement: The placement that it computes on.
        partial_gradient: True if it returns a summand of the gradient; only for ``R``.
    """

    placement: Placement
    partial_gradient: bool = False


class Conversion(NamedTuple):
    """The collectives of one conversion; its method in `nnx_nnscaler.runtime` is ``forward__backward``.

    Attributes:
        forward: ``"keep"``, ``"split"``, ``"all_gather"``, ``"all_to_all"``, ``"all_reduce"`` or
            ``"reduce_scatter"``.
        backward: The same choices, for the gradient.
    """

    forward: str
    backward: str

    @property
    def method(self) -> str:
        """The name of the runtime's method."""
        return f"{self.forward}__{self.backward}"


def uses_of(strategy: Strategy) -> tuple[Use, ...]:
    """Return the use of each operand of a strategy."""
    partial = not strategy.is_replicated
    return tuple(Use(placement, partial and placement == R) for placement in strategy.inputs)


def conversion(source: Placement, use: Use) -> Conversion | None:
    """Return the conversion of a value for a consumer; None if none is necessary.

    Raises:
        ValueError: No conversion exists: only operators produce ``P``.

    Example:
        >>> conversion(S(1), Use(R, partial_gradient=True)).method
        'all_gather__reduce_scatter'
    """
    target, partial = use
    if target == source:
        return Conversion("keep", "all_reduce") if partial else None
    if target == P:
        raise ValueError(f"nothing converts {source} into partial sums")
    if source == P:
        if target == R:
            return Conversion("all_reduce", "all_reduce" if partial else "keep")
        return Conversion("reduce_scatter", "all_gather")
    if source == R:
        return Conversion("split", "all_gather")
    if target == R:
        return Conversion("all_gather", "reduce_scatter" if partial else "split")
    return Conversion("all_to_all", "all_to_all")
