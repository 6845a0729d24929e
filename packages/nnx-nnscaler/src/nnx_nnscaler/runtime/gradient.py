"""What the gradients of guarded parameters are parts of, by how the parameter is stored.

It owns no gradient: those stay where autograd and the reducer put them. Who looks at one outside of local
mode is shown the whole by `parameter`, which asks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nnx_nnscaler.runtime.conversions import Conversions
from nnx_nnscaler.runtime.part import LocalPart, Summand, UnitPart

if TYPE_CHECKING:
    from nnx_nnscaler.runtime.reducer import Reducer
    from nnx_nnscaler.runtime.zero import RowPart


class OfParts:
    """Of a parameter that the ranks of a unit store in parts: so are its gradients."""

    def are_whole(self) -> bool:  # noqa: D102 # as the protocol says, here and below
        return False

    def source_of(self, gradient: Tensor) -> UnitPart:  # noqa: D102
        return LocalPart(gradient)

    def assigned(self) -> None:  # noqa: D102
        pass


class OfSynchronized:
    """Of a parameter that is whole on every rank, and whose gradients the reducer sums over the unit.

    Until it has, as while gradients are accumulated, each rank has a summand.
    """

    def __init__(self, parameter: nn.Parameter, reducer: Reducer, unit: Conversions) -> None:
        self._parameter = parameter
        self._reducer = reducer
        self._unit = unit

    def are_whole(self) -> bool:  # noqa: D102
        return self._reducer.is_complete(self._parameter)

    def source_of(self, gradient: Tensor) -> UnitPart:  # noqa: D102
        return _Summand(gradient, self._unit, is_sum=lambda: self._is_sum(gradient))

    def _is_sum(self, gradient: Tensor) -> bool:
        return self.are_whole() and self._parameter.grad is gradient

    def assigned(self) -> None:  # noqa: D102
        self._reducer.note_complete(self._parameter)


class _Summand(Summand):
    """A summand until it becomes the sum, in place."""

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


class OfRows:
    """Of a parameter of which this rank stores rows: its gradients are rows, too."""

    def __init__(self, rows: RowPart) -> None:
        self._rows = rows

    def are_whole(self) -> bool:  # noqa: D102
        return False

    def source_of(self, gradient: Tensor) -> UnitPart:  # noqa: D102
        return _Rows(gradient, self._rows)

    def assigned(self) -> None:  # noqa: D102
        pass


class _Rows:
    """A tensor whose rows lie as those of a parameter."""

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
