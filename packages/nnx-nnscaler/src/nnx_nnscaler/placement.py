"""Placements: how the ranks of one plan unit hold one tensor.

There are three. ``R``: every rank holds the whole tensor. ``P``: every rank holds a summand, the tensor
is their sum. ``S(dim, groups)``: the tensor dim is viewed as ``(groups, size / groups)`` and cut evenly
along the second factor, so that ``groups=3`` splits a fused query-key-value projection by heads. A negative
dim is not allowed. Standard library only, so that a plan can be read without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nnx_checkpoint.box import Box

_SHARD = re.compile(r"S\((\d+)(?:, ?(\d+))?\)")


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """How the ranks of a unit hold a tensor; written with `R`, `P` and `S`.

    Attributes:
        kind: ``"R"`` replicated, ``"P"`` partial sums, ``"S"`` sharded.
        dim: The tensor dim that is cut; 0 unless sharded.
        groups: The number of equal groups that are cut each; 1 for a plain cut.

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
        """The placement that `str` wrote.

        Raises:
            ValueError: The text is none.
        """
        if text in ("R", "P"):
            return R if text == "R" else P
        found = _SHARD.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a placement: expected 'R', 'P', 'S(dim)' or 'S(dim,groups)'")
        return S(int(found[1]), groups=int(found[2] or 1))

    @property
    def is_shard(self) -> bool:
        """Whether each rank holds a part of the elements."""
        return self.kind == "S"

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape that each of `size` ranks holds of a tensor.

        Example:
            >>> S(0).local_shape((6, 4), 2)
            (3, 4)
        """
        if not self.is_shard:
            return tuple(shape)
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Whether a tensor of this shape can be cut evenly so over `size` ranks."""
        return not self.is_shard or (self.dim < len(shape) and shape[self.dim] % (size * self.groups) == 0)

    def boxes(self, shape: Sequence[int], *, rank: int, size: int) -> tuple[Box, ...]:
        """Where a rank's local tensor lies, one box for each group, in the local tensor's order.

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
    """Sharded along a tensor dim."""
    return Placement("S", dim, groups)
