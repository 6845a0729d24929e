"""Copy the local shards for an asynchronous save.

All local data goes into one buffer in host memory, which the next save reuses: allocating fresh memory costs
several times as much as the copy. The copy neither communicates nor touches files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nnx_base.dtypes import dtype_name
from nnx_base.shard import Shard
from nnx_checkpoint.format.rankfile_header import DTYPES
from nnx_checkpoint.writing.pinned import pinned_empty

_ALIGNMENT = 64
"""Bytes: a cache line, and more than any element type needs."""


class Arena:
    """One reused buffer, which grows on demand.

    The next `stage` overwrites the tensors of the last one.

    Example:
        >>> from nnx_base.shard import shard_of
        >>> weight = torch.ones(2)
        >>> staged = Arena().stage({"w": shard_of(weight)})
        >>> _ = weight.zero_()
        >>> staged["w"].data
        (tensor([1., 1.]),)
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._places: list[Tensor] = []
        self._is_pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of the buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def stage(self, shards: dict[str, Shard]) -> dict[str, Shard]:
        """Return shards with the same boxes whose data is a copy in the buffer.

        Tensors without data, such as those on the meta device, are not copied; the save refuses them.
        """
        sources = [view for shard in shards.values() for view in shard.data if _has_data(view)]
        # An inference tensor (as in validation) cannot be written in place later: allocate outside that mode.
        with torch.inference_mode(False), torch.no_grad():
            places = self._arrange(sources)
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)
        for device in {source.device for source in sources if not source.is_cpu}:
            torch.accelerator.synchronize(device)
        copies = iter(places)
        return {
            name: Shard(
                shard.shape,
                shard.dtype,
                shard.boxes,
                tuple(next(copies) if _has_data(view) else view for view in shard.data),
            )
            for name, shard in shards.items()
        }

    def _arrange(self, sources: list[Tensor]) -> list[Tensor]:
        """Return a view into the buffer for each tensor (the last views if shapes and dtypes are equal)."""
        layout = [(source.shape, source.dtype) for source in sources]
        pinned = any(source.is_cuda for source in sources)
        if self._buffer is not None and layout == self._layout and self._is_pinned >= pinned:
            return self._places
        starts, size = [], 0
        for source in sources:
            starts.append(size)
            nbytes = source.numel() * source.element_size()
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._large_enough(size, pinned)
        self._layout = layout
        self._places = [
            buffer[start : start + source.numel() * source.element_size()]
            .view(source.dtype)
            .view(source.shape)
            for start, source in zip(starts, sources, strict=True)
        ]
        return self._places

    def _large_enough(self, size: int, pinned: bool) -> Tensor:
        buffer = self._buffer
        if buffer is None or buffer.nbytes < size or (pinned and not self._is_pinned):
            self._places, self._buffer, buffer = [], None, None  # free the old buffer before allocating
            buffer = pinned_empty(size, torch.uint8) if pinned else torch.empty(size, dtype=torch.uint8)
            self._buffer, self._is_pinned = buffer, pinned
        return buffer


def _has_data(view: Tensor) -> bool:
    return view.layout is torch.strided and not view.is_meta and dtype_name(view.dtype) in DTYPES
