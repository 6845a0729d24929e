"""Parameters one after the other in flat buffers, exactly as large as they are together.

A `Segment` is what a chunk has of one kind: the same dtype between steps, the same dtype in a step, all
trained or all frozen. Parameters that divide evenly come first, so every one lies at an address that is a
multiple of as much as its own size is, and no byte is lost to padding. This file knows layouts and views; it
allocates and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Segment", "is_chunkable", "segments_of", "view_like"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WIDEST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Parameters of one kind, as they follow each other in each flat buffer.

    Attributes:
        dtype: Between steps.
        working_dtype: In a step.
        names: Full names.
        parameters: The user's objects.
        offsets: Of each parameter's first element.
        numel: Of all.
        templates: Meta tensors with the shape and strides of each.
    """

    dtype: torch.dtype
    working_dtype: torch.dtype
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    numel: int
    templates: tuple[Tensor, ...]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer."""
        return [
            view_like(buffer, template, offset)
            for template, offset in zip(self.templates, self.offsets, strict=True)
        ]


def is_chunkable(parameter: nn.Parameter) -> bool:
    """Whether a parameter can lie in a flat buffer: it has values, of an ordinary floating dtype.

    Example:
        >>> is_chunkable(nn.Parameter(torch.zeros(2))), is_chunkable(nn.Parameter(torch.zeros(2).cfloat()))
        (True, False)
    """
    return parameter.dtype in _DTYPES and not nn.parameter.is_lazy(parameter)


def segments_of(
    parameters: Mapping[str, nn.Parameter], working_dtype: Callable[[nn.Parameter], torch.dtype]
) -> list[Segment]:
    """Lay parameters out, kind by kind, in the order in which kinds first occur.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> [segment] = segments_of(dict(layer.named_parameters()), lambda _: torch.bfloat16)
        >>> segment.names, segment.offsets, segment.numel
        (('weight', 'bias'), (0, 6), 8)
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        kind = (parameter.dtype, working_dtype(parameter), parameter.requires_grad)
        kinds.setdefault(kind, []).append((name, parameter))
    return [_segment(dtype, working, members) for (dtype, working, _), members in kinds.items()]


def _segment(
    dtype: torch.dtype, working: torch.dtype, members: Iterable[tuple[str, nn.Parameter]]
) -> Segment:
    ordered = sorted(members, key=lambda member: -_evenness(member[1].numel()))
    offsets, end = [], 0
    for _, parameter in ordered:
        offsets.append(end)
        end += parameter.numel()
    return Segment(
        dtype=dtype,
        working_dtype=working,
        names=tuple(name for name, _ in ordered),
        parameters=tuple(parameter for _, parameter in ordered),
        offsets=tuple(offsets),
        numel=end,
        templates=tuple(_template(parameter) for _, parameter in ordered),
    )


def _evenness(numel: int) -> int:
    """The largest power of two that divides a number, up to what alignment can gain from."""
    return min(numel & -numel, _WIDEST) if numel else _WIDEST


def _template(parameter: nn.Parameter) -> Tensor:
    """Keeps an order of elements such as channels last, and makes a view with gaps dense."""
    with torch.no_grad():
        return torch.empty_like(parameter.detach(), device="meta", memory_format=torch.preserve_format)


def view_like(buffer: Tensor, template: Tensor, offset: int = 0) -> Tensor:
    """Elements of a flat buffer from `offset` on, in the shape and order of `template`."""
    with torch.no_grad(), torch.inference_mode(False):
        return buffer.as_strided(template.shape, template.stride(), buffer.storage_offset() + offset)
