"""Values of symbolic sizes, by reading their expressions; nothing is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from nnx_nnscaler.ir import Dim, Graph

__all__ = ["other_symbols", "size_at"]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def other_symbols(graph: Graph) -> dict[str, int]:
    """Other values for a graph's symbols than those traced, to tell sizes that happen to be equal."""
    return {name: 10_007 + 2 * index for index, name in enumerate(graph.symbols)}


def size_at(dim: Dim, symbols: Mapping[str, int]) -> int | None:
    """The value of a size for given symbols; None where its expression has other forms than arithmetic.

    Example:
        >>> from nnx_nnscaler.ir import Size
        >>> size_at(Size("16*B + 1", 33), {"B": 3})
        49
    """
    if isinstance(dim, int):
        return dim
    try:
        return _value(ast.parse(dim.expr, mode="eval").body, symbols)
    except (KeyError, SyntaxError, TypeError, ZeroDivisionError):
        return None


def _value(node: ast.expr, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, symbols), _value(node.right, symbols))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, symbols)
    raise TypeError(node)
