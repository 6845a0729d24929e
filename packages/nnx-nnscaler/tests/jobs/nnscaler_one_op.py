"""Graphs of one operator, written as its call, for tests of rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nnx_nnscaler.ir.graph import Code, Graph, Op, Ref, Size, TensorMeta, hint_of
from nnx_nnscaler.rules.rule import operator_of


class T(NamedTuple):
    """A tensor operand to be."""

    shape: tuple[Any, ...]
    dtype: str = "float32"
    differentiable: bool = True


def ints(*shape: int) -> T:
    return T(shape, "int64")


def bools(*shape: int) -> T:
    return T(shape, "bool")


def f(*shape: int) -> T:
    return T(shape)


def B(times: int = 1) -> Size:
    """A multiple of a batch of 8."""
    return Size("B" if times == 1 else f"{times}*B", 8 * times)


def one_op(target: str, *args: Any, **kwargs: Any) -> tuple[Graph, Op]:
    """A graph of one operator whose operands are inputs, and the operator; its results come from torch."""
    metas: dict[str, TensorMeta] = {}

    def named(argument: Any) -> Any:
        if isinstance(argument, T):
            name = f"x{len(metas)}"
            metas[name] = TensorMeta(argument.shape, argument.dtype, argument.differentiable)
            return Ref(name)
        if isinstance(argument, (list, tuple)):
            return [named(item) for item in argument]
        return argument

    op = Op(
        "y", target, tuple(map(named, args)), {name: named(value) for name, value in kwargs.items()}, None
    )
    sized = [name for name, meta in metas.items() if any(isinstance(dim, Size) for dim in meta.shape)]
    symbols = {"B": (sized[0], 0)} if sized else {}
    op.output = _results(op, metas, symbolic=bool(symbols))
    return Graph([], {}, {}, {}, metas, [op], Ref("y"), symbols=symbols), op


def _results(op: Op, metas: dict[str, TensorMeta], *, symbolic: bool) -> Any:
    def meta_tensor(argument: Any) -> Any:
        if isinstance(argument, Ref):
            meta = metas[argument.name]
            return torch.empty(meta.hints, dtype=getattr(torch, meta.dtype), device="meta")
        if isinstance(argument, list):
            return [meta_tensor(item) for item in argument]
        if isinstance(argument, Code):
            return getattr(torch, argument.text.removeprefix("torch."))
        return hint_of(argument) if isinstance(argument, Size) else argument

    made = operator_of(op.target)(
        *map(meta_tensor, op.args), **{k: meta_tensor(v) for k, v in op.kwargs.items()}
    )

    def meta(tensor: torch.Tensor) -> TensorMeta:
        shape = tuple(
            B(size // 8) if symbolic and size % 8 == 0 and i == 0 else size
            for i, size in enumerate(tensor.shape)
        )
        return TensorMeta(shape, str(tensor.dtype).removeprefix("torch."), tensor.is_floating_point())

    return tuple(map(meta, made)) if isinstance(made, (tuple, list)) else meta(made)
