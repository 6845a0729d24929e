"""The form of a rule: how one kind of operator can run on the ranks of a unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from nnx_nnscaler.ir import Argument, Dim, Graph, Op, TensorMeta
from nnx_nnscaler.placement import Placement, R
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["Rule", "Writer", "outputs_of", "replicate"]


class Writer(Protocol):
    """What a rule needs to write a call; `codegen` provides it.

    Attributes:
        size: Ranks of the unit.
    """

    size: int

    def value(self, argument: Argument) -> str:
        """An argument as Python code.

        A Ref is the local variable in the placement that the strategy wants, a Size its global expression.
        """

    def dim(self, dim: Dim, *, sharded: bool = False) -> str:
        """A size as code: the global one, or that of one rank's part."""

    def shape(self, meta: TensorMeta, placement: Placement) -> str:
        """A local shape as code: ``"[B // 2, 16, 64]"``."""

    def call(self, op: Op) -> str:
        """The operator itself on its arguments, in the most readable form: ``F.linear(x, w, b)``."""


class Rule(ABC):
    """How operators of one kind can be split."""

    @abstractmethod
    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        """Every way that splits work or data evenly for the traced sizes; `replicate` is added by the caller.

        Args:
            op: The operator.
            graph: Where it stands, for the metas of its operands.
            size: Ranks of the unit, at least 2.
        """

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        """The right-hand side that computes this rank's result: the operator itself, unless overridden."""
        return writer.call(op)

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        """What the values of integer operands stay below where they are indices, for made-up data."""
        return None


def outputs_of(op: Op) -> tuple[TensorMeta, ...]:
    """Metas of the tensors that an operator makes; what is None among several results is left out."""
    if op.output is None:
        return ()
    if isinstance(op.output, TensorMeta):
        return (op.output,)
    return tuple(meta for meta in op.output if meta is not None)


def replicate(op: Op) -> Strategy:
    """Every rank does all of it."""
    return Strategy("replicate", (R,) * len(op.operands()), (R,) * len(outputs_of(op)))
