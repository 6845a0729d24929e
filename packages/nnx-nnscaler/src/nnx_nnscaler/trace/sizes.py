"""Symbolic sizes of a trace as expressions in ``B``, the size of the batch.

Owns the naming of symbols, the printing of expressions and what must hold of them. torch gives every input
its own symbol; here all that are the batch are one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from nnx_nnscaler.ir import Dim, Size, TensorMeta
from nnx_nnscaler.trace.inputs import Inputs

__all__ = ["BATCH", "Sizes", "UnboundSizeError", "evaluate"]

BATCH = "B"
_INPUT_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_EXPRESSION = re.compile(r"[\w\s+\-*/%().,<>=!]*")


# What is the same for all of these is taken to be the same for any batch: torch's expressions are made of
# sums, products, quotients, remainders and comparisons with small numbers.
_SAMPLES = (*range(2, 67), 1_000, 1_023, 1_024, 1_000_003, 2**40 + 15)


class UnboundSizeError(Exception):
    """A size that depends on the values of tensors."""


def evaluate(expr: str, batch: int) -> Any:
    """Value of an expression that a trace made, for a batch size.

    Example:
        >>> evaluate("16*B", 3)
        48
    """
    if not _EXPRESSION.fullmatch(expr):
        raise ValueError(f"{expr!r} is not an expression over sizes")
    allowed = {BATCH: batch, "max": max, "min": min, "math": __import__("math"), "True": True, "False": False}
    return eval(expr, {"__builtins__": {}}, allowed)


class Sizes:
    """Sizes of one exported program.

    Args:
        program: The program.
        inputs: Its sample.
        leaves: What the exporter made of the tensors among the inputs.
    """

    def __init__(self, program: ExportedProgram, inputs: Inputs, leaves: Sequence[Tensor]) -> None:
        self._batch = sympy.Symbol(BATCH, integer=True, positive=True)
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._known: dict[Any, str] = {}
        self.hint = inputs.batch
        self.origin: tuple[str, int] | None = None
        for index in inputs.batched:
            dim: Any = leaves[inputs.tensors.index(index)].shape[0]
            if _is_free(dim):
                self._symbols.update(dict.fromkeys(dim.node.expr.free_symbols, self._batch))
                self.origin = self.origin or (inputs.names[index], 0)
        self._free = [leaf.ndim > 0 and _is_free(leaf.shape[0]) for leaf in leaves]
        self.guards = self._guards(program) if self.origin else ()

    def value(self, value: Any) -> Any:
        """A size or another number of the trace: an int, float or bool, or a Size.

        Raises:
            UnboundSizeError: It depends on the values of tensors.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        text = self._text(value.node.expr)
        found = evaluate(text, self.hint)
        return Size(text, found) if text != repr(found) else found

    def meta(self, tensor: Tensor, *, differentiable: bool) -> TensorMeta:
        """What the graph says of a tensor of the trace."""
        shape: tuple[Dim, ...] = tuple(self.value(dim) for dim in tensor.shape)
        return TensorMeta(shape, str(tensor.dtype).removeprefix("torch."), differentiable)

    def _text(self, expr: Any) -> str:
        if expr not in self._known:
            unknown = expr.free_symbols - self._symbols.keys()
            if unknown:
                raise UnboundSizeError(str(expr))
            self._known[expr] = _plainest(PythonPrinter().doprint(expr.xreplace(self._symbols)))
        return self._known[expr]

    def _guards(self, program: ExportedProgram) -> tuple[str, ...]:
        found = {self._guard(code) for code in getattr(program, "_guards_code", None) or ()}
        for symbol, bounds in program.range_constraints.items():
            if symbol in self._symbols:
                found |= {f"{BATCH} >= {bounds.lower}"} if bounds.lower > 2 else set()
                found |= {f"{BATCH} <= {bounds.upper}"} if bounds.upper.is_Integer else set()
        return tuple(sorted(found - {""}))

    def _guard(self, code: str) -> str:
        if not all(self._free[int(leaf)] for leaf, _ in _INPUT_SIZE.findall(code)):
            return ""  # the meta of that input has the number
        text = _INPUT_SIZE.sub(BATCH, code)
        if "L[" in text:
            raise UnboundSizeError(code)
        return "" if all(evaluate(text, batch) for batch in _SAMPLES) else text


def _plainest(text: str) -> str:
    """An expression as ``a*B + b`` where it is that: ``(8*B) // B`` is ``8``."""
    if BATCH not in text:
        return text
    values = [evaluate(text, batch) for batch in _SAMPLES]
    slope = values[1] - values[0]
    rest = values[0] - _SAMPLES[0] * slope
    exact = all(isinstance(value, int) for value in values)
    if not exact or any(value != slope * batch + rest for batch, value in zip(_SAMPLES, values, strict=True)):
        return text
    if slope == 0:
        return str(rest)
    product = BATCH if slope == 1 else f"{slope}*{BATCH}"
    return product if rest == 0 else f"{product} {'+' if rest > 0 else '-'} {abs(rest)}"


def _is_free(dim: Any) -> bool:
    return isinstance(dim, torch.SymInt) and bool(dim.node.expr.free_symbols)
