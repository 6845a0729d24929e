"""The form of a rule: how one kind of operator can run on the ranks of a unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from nnx_nnscaler.ir import Argument, Code, Dim, Graph, Op, Ref, TensorMeta, refs_in
from nnx_nnscaler.placement import Placement, R
from nnx_nnscaler.plan.program_plan import Strategy


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
            graph: The graph that it stands in, for the metas of its operands.
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


# --- call ------------------------------------------------------------------------------------------------
#
# An operator seen by a rule: its arguments by name, its shapes, and strategies written by argument name.


_Inputs = Mapping[str, Placement | Sequence[Placement]]


@cache
def operator_of(target: str) -> Any:
    """The torch operator of a target such as ``"aten.linear.default"``; None where there is none.

    Example:
        >>> operator_of("aten.linear.default")
        <OpOverload(op='aten.linear', overload='default')>
    """
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


@cache
def _schema(target: str) -> tuple[tuple[str, Any], ...]:
    operator = operator_of(target)
    if operator is None:
        return ()
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def targets(names: str) -> list[str]:
    """Targets of torch's own operators.

    Example:
        >>> targets("abs max.other")
        ['aten.abs', 'aten.max.other']
    """
    return [f"aten.{name}" for name in names.split()]


def bound(op: Op) -> dict[str, Argument]:
    """The arguments that an operator has by name, in its order; ``arg0``, ``arg1`` ... without a schema."""
    names = [name for name, _ in _schema(op.target)] or [f"arg{index}" for index in range(len(op.args))]
    return dict(zip(names, op.args, strict=False)) | op.kwargs


def argument_of(op: Op, name: str) -> Argument:
    """An argument of an operator by name, or its default."""
    given = bound(op)
    return given[name] if name in given else dict(_schema(op.target)).get(name)


def placement_of(op: Op, strategy: Strategy, name: str) -> Placement:
    """The placement that a strategy gives to a tensor argument, the first of a list.

    Raises:
        KeyError: The operator has no such tensor argument.
    """
    position = 0
    for argument_name, argument in bound(op).items():
        count = len(list(refs_in(argument)))
        if argument_name == name and count:
            return strategy.inputs[position]
        position += count
    raise KeyError(name)


def with_code(op: Op, **code: str) -> Op:
    """The operator with some of its arguments replaced by Python code, to be written by `Writer.call`."""
    names = list(bound(op))[: len(op.args)]
    return replace(
        op,
        args=tuple(Code(code[n]) if n in code else value for n, value in zip(names, op.args, strict=True)),
        kwargs={n: Code(code[n]) if n in code else value for n, value in op.kwargs.items()},
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One operator where it stands, with its arguments by name.

    Attributes:
        op: The operator.
        graph: The graph that it stands in.
        size: Ranks of the unit.
        given: The arguments that the operator has, in its order: positional ones, then keywords.
    """

    op: Op
    graph: Graph
    size: int
    given: Mapping[str, Argument]

    @classmethod
    def of(cls, op: Op, graph: Graph, size: int) -> Call:
        """The call of an operator."""
        return cls(op, graph, size, bound(op))

    def __getitem__(self, name: str) -> Argument:
        return self.given[name] if name in self.given else argument_of(self.op, name)

    def meta(self, name: str) -> TensorMeta | None:
        """Meta of a tensor argument; None where it is none."""
        argument = self[name]
        return self.graph.meta(argument.name) if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor argument for the traced sample."""
        meta = self.meta(name)
        return () if meta is None else meta.hints

    def metas(self, name: str) -> list[TensorMeta]:
        """Metas of the tensors in a list argument."""
        return [self.graph.meta(ref) for ref in refs_in(self[name])]

    def tensors(self) -> list[str]:
        """Names of the arguments that are one tensor."""
        return [name for name, argument in self.given.items() if isinstance(argument, Ref)]

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        """Metas of its results."""
        return outputs_of(self.op)

    @property
    def output(self) -> TensorMeta:
        """Meta of its only result."""
        return self.outputs[0]

    def dim(self, value: int, ndim: int | None = None) -> int:
        """A dim argument as a number that is not negative."""
        ndim = len(self.output.shape) if ndim is None else ndim
        return value + ndim if value < 0 else value

    def strategy(
        self, name: str, inputs: _Inputs, outputs: Sequence[Placement], *, call: str = ""
    ) -> Strategy:
        """A strategy from placements by argument name; arguments that are not named are ``R``."""
        placements: list[Placement] = []
        for argument_name, argument in self.given.items():
            refs = list(refs_in(argument))
            wanted = inputs.get(argument_name, R)
            placements.extend([wanted] * len(refs) if isinstance(wanted, Placement) else wanted)
        return Strategy(name, tuple(placements), tuple(outputs), call)
