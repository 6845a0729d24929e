"""One program and the calls that it is for: a check of sizes that costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nnx_nnscaler.codegen.emit import inputs_of
from nnx_nnscaler.ir import Graph, text_of

if TYPE_CHECKING:
    from nnx_nnscaler.compiling import Compiled

__all__ = ["Variant"]


@dataclass(slots=True)
class Variant:
    """A program with its conditions.

    Attributes:
        compiled: The program.
        number: When it was made among those of its module.
    """

    compiled: Compiled
    number: int
    _fits: Callable[..., bool] = field(init=False)
    _hindrance: Callable[..., str] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.compiled.graph
        fitting = [*_shape_conditions(graph), *(f"({guard})" for guard in graph.guards)]
        self._fits = _function(graph, " and ".join(fitting) or "True")
        conditions = [
            (f"{symbol} >= 2", f"its batch has a size of {{{symbol}}}, and programs are for two or more")
            for symbol in graph.symbols
        ]
        conditions += [
            (f"({size}) % {number} == 0", f"{size} = {{{size}}} is not a multiple of {number}")
            for size, number in self.compiled.plan.divisible
        ]
        reasons = "".join(f"f{text!r} if not ({condition}) else " for condition, text in conditions)
        self._hindrance = _function(graph, f"{reasons}''")

    def shapes_fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors have the program's sizes, and its symbols values that it was traced for."""
        return self._fits(*[tensor.shape for tensor in tensors])

    def hindrance(self, tensors: Sequence[Tensor]) -> str:
        """Why the program must not run at these sizes; empty where it may."""
        return self._hindrance(*[tensor.shape for tensor in tensors])


def _shape_conditions(graph: Graph) -> list[str]:
    conditions = []
    for index, name in enumerate(inputs_of(graph)):
        dims = "".join(f"{text_of(dim)}, " for dim in graph.metas[name].shape)
        conditions.append(f"shape_{index} == ({dims})")
    return conditions


def _function(graph: Graph, result: str) -> Callable[..., Any]:
    """A function of the shapes of the inputs, with the graph's symbols bound."""
    names = inputs_of(graph)
    arguments = ", ".join(f"shape_{index}" for index in range(len(names)))
    lines = [f"def function({arguments}):"]
    lines += [
        f"    {symbol} = shape_{names.index(name)}[{dim}]" for symbol, (name, dim) in graph.symbols.items()
    ]
    lines.append(f"    return {result}")
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    function: Callable[..., Any] = space["function"]
    return function
