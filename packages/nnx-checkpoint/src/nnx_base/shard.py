"""Define the local shard: the elements of one logical tensor that this rank holds.

A logical tensor has a global shape and is partitioned into *boxes* (axis-aligned hyperrectangles). Every
engine's partitioning reduces to boxes: replicas, DTensor shards along any tensor dim, local shards of
generated code, and ranges of a flattened buffer. This module connects boxes (`nnx_base.box`) with tensors.
It never communicates and never copies data. `nnx_checkpoint` writes and reads shards;
`nnx_core.backend` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nnx_base._torch_compat import local_mode
from nnx_base.box import Box, boxes_of_range

__all__ = ["Box", "Shard", "shard_of", "shard_of_range"]

_boxes: WeakKeyDictionary[DeviceMesh, dict[Any, Box]] = WeakKeyDictionary()
"""The boxes of a mesh by shape, placements and coordinate: another world may have an equal mesh."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The local shard of one logical tensor: views of the engine's own storage, never copies.

    Attributes:
        shape: Global shape of the logical tensor.
        dtype: Dtype of the logical tensor and of every view.
        boxes: The box of each view in the logical tensor; empty if this rank holds nothing.
        data: One view for each box, of exactly the box's size. Writing into a view fills the engine's
            own storage in place.
        is_copy: True if the module's ``state_dict`` made the tensor; other ranks' copies may differ.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    data: tuple[Tensor, ...]
    is_copy: bool = False

    def __post_init__(self) -> None:
        if len(self.boxes) != len(self.data):
            raise ValueError(f"a shard has {len(self.boxes)} boxes but {len(self.data)} views")
        for box, view in zip(self.boxes, self.data, strict=True):
            if view.shape != box.size:
                raise ValueError(f"a view of shape {tuple(view.shape)} cannot fill {box}")

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(view.numel() * view.element_size() for view in self.data)

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the unsharded tensor as one box."""
        return len(self.boxes) == 1 and self.boxes[0].size == self.shape

    def fill_from(self, full: Tensor) -> None:
        """Copy the local shard out of an unsharded tensor of the logical shape."""
        for box, view in zip(self.boxes, self.data, strict=True):
            view.copy_(full[box.slices])

    def copy_from(self, other: Shard) -> None:
        """Copy another process's shard of the same boxes."""
        if other.boxes != self.boxes:
            raise ValueError(f"a shard of {other.boxes} cannot fill {self.boxes}")
        for view, data in zip(self.data, other.data, strict=True):
            view.copy_(data)


def shard_of(tensor: Tensor) -> Shard:
    """Describe a plain tensor (unsharded) or a DTensor (any placement but partial).

    Args:
        tensor: The tensor as the engine holds it; autograd history is ignored.

    Returns:
        A shard whose views alias the tensor's own storage. It has no box if this rank holds no
        element, except that an empty tensor keeps its one empty box.

    Example:
        >>> shard_of(torch.zeros(2, 3)).is_whole
        True
    """
    with local_mode():  # describe a guarded parameter's shard, not the gathered tensor
        return _shard_of(tensor)


def _shard_of(tensor: Tensor) -> Shard:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if hasattr(tensor, "_nnx_left"):  # on other ranks, by `nnx_core.view.modules.leave_on_meta`
        return Shard(shape, dtype, (), ())
    if not isinstance(tensor, DTensor):
        return Shard(shape, dtype, (Box.whole(shape),), (tensor.detach(),))
    box = _box_of(tensor, shape)
    if 0 in box.size and tensor.numel() > 0:
        return Shard(shape, dtype, (), ())
    # `to_local` would first make another view of a parameter, by autograd where gradients are recorded.
    return Shard(shape, dtype, (box,), (tensor._local_tensor.detach(),))


def _box_of(tensor: DTensor, shape: tuple[int, ...]) -> Box:
    """Return the box of this rank, from the first tensor of its shape and placements.

    Torch takes longer to compute it than everything else in a description, and a copy to memory describes
    all tensors every few steps.
    """
    mesh = tensor.device_mesh
    place = (shape, tensor.placements, tuple(mesh.get_coordinate() or ()))
    known = _boxes.setdefault(mesh, {})
    if place not in known:
        chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
        known[place] = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return known[place]


def shard_of_range(flat: Tensor, *, shape: Sequence[int], start: int) -> Shard:
    """Describe a slice of a flat buffer that holds elements ``[start, start + len)`` of a tensor.

    ZeRO partitions and chunk managers expose their elements as such slices.

    Args:
        flat: 1-d view on the elements that this rank holds.
        shape: Global shape of the logical tensor.
        start: Flat index, in the logical tensor, of the first element of `flat`.

    Returns:
        A shard whose views alias `flat`.
    """
    boxes = boxes_of_range(shape, start, start + flat.numel())
    pieces = torch.split(flat.detach(), [box.numel for box in boxes]) if boxes else ()
    views = tuple(piece.view(box.size) for piece, box in zip(pieces, boxes, strict=True))
    return Shard(tuple(shape), flat.dtype, tuple(boxes), views)
