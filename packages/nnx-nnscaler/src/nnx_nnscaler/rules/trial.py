"""Try one strategy of an operator: check that its results on shards are shards of its full result.

One process plays all ranks, on random data, forward and backward. Rewritten operators cannot be tried: here
every rank runs the operator itself, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nnx_nnscaler.ir.graph import Argument, Code, Op, Ref, Size
from nnx_nnscaler.ir.placement import Placement, Strategy
from nnx_nnscaler.rules.rule import operator_of

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""An operator as a function of its tensor operands; every other argument is fixed."""


DRAWS = ("normal", "large", "positive")
"""Kinds of data: large values show nonlinearity that small ones hide, and roots need positive values."""


_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}


def runner(op: Op) -> Run | None:
    """Return an operator as a function of its operands; None if only a program knows an argument."""
    operator = operator_of(op.target)
    if operator is None or not all(_is_known(argument) for argument in (*op.args, *op.kwargs.values())):
        return None

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(operands)
        args = [_value(argument, rest) for argument in op.args]
        kwargs = {name: _value(argument, rest) for name, argument in op.kwargs.items()}
        result = operator(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(item for item in results if isinstance(item, Tensor))

    return run


def draw(
    shape: Sequence[int], dtype: torch.dtype, kind: str, bound: int, generator: torch.Generator
) -> Tensor:
    """Return random values: floating point ones in float64 if possible, integers below a bound."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, max(bound, 1), shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else _WIDE.get(dtype, dtype)
    values = torch.randn(shape, dtype=wide, generator=generator)
    if kind == "positive" and not dtype.is_complex:
        return values.abs().clamp(0.05, 0.95)
    return values * 1000 if kind == "large" else values


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of an operator on unsharded operands, to compare shards with.

    Attributes:
        operands: The unsharded operands.
        results: The unsharded results.
        cotangents: The gradient of every result; None for a result without one.
        gradients: The resulting gradient of every operand; None for an operand without one.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, run: Run, operands: Sequence[Tensor], generator: torch.Generator) -> Trial:
        """Run the operator on unsharded operands, and raise its errors."""
        leaves, results = _forward(run, operands)
        cotangents = tuple(
            torch.randn(result.shape, dtype=result.dtype, generator=generator)
            if result.requires_grad
            else None
            for result in results
        )
        gradients = _backward(leaves, results, cotangents)
        return cls(tuple(operands), tuple(result.detach() for result in results), cotangents, gradients)

    def disagreement(self, run: Run, strategy: Strategy, size: int) -> str:
        """Return the difference of the ranks' results or gradients from the unsharded ones; empty if none.

        Args:
            run: The operator on each rank.
            strategy: The placements of operands and results.
            size: The number of ranks.
        """
        split = [list(_split(t, p, size)) for t, p in zip(self.operands, strategy.inputs, strict=True)]
        cotangents = [
            [None] * size if whole is None else list(_dual(whole, placement, size))
            for whole, placement in zip(self.cotangents, strategy.outputs, strict=True)
        ]
        made, gradients = [], []
        for rank in range(size):
            try:
                leaves, results = _forward(run, [parts[rank] for parts in split])
                wanted = [
                    p.local_shape(t.shape, size) for p, t in zip(strategy.outputs, self.results, strict=True)
                ]
                if (shapes := [tuple(result.shape) for result in results]) != wanted:
                    return f"rank {rank} of {size} makes shapes {shapes}, not {wanted}"
                gradients.append(_backward(leaves, results, [parts[rank] for parts in cotangents]))
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                return f"rank {rank} of {size} cannot run it: {error}"
            made.append([result.detach() for result in results])
        return self._compared(made, gradients, strategy, size)

    def _compared(
        self,
        made: Sequence[Sequence[Tensor]],
        gradients: Sequence[Sequence[Tensor | None]],
        strategy: Strategy,
        size: int,
    ) -> str:
        for index, (whole, placement) in enumerate(zip(self.results, strategy.outputs, strict=True)):
            if far := _farthest(_joined([parts[index] for parts in made], placement), whole):
                return f"result {index} of {size} ranks is off by {far:.3g}"
        for index, placement in enumerate(strategy.inputs):
            gradient = self.gradients[index]
            if gradient is None:
                continue
            parts = [torch.zeros(()) if rank[index] is None else rank[index] for rank in gradients]
            for whole_gradient in _gathered(parts, placement):
                if far := _farthest(whole_gradient, gradient):
                    return f"the gradient of operand {index} of {size} ranks is off by {far:.3g}"
        return ""


def _forward(run: Run, operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for tensor in operands
    ]
    with torch.enable_grad():
        return leaves, run(leaves)


def _backward(
    leaves: Sequence[Tensor], results: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    followed = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad and c is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not followed or not wanted:
        return (None,) * len(leaves)
    found = iter(
        torch.autograd.grad([r for r, _ in followed], wanted, [c for _, c in followed], allow_unused=True)
    )
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


def _split(tensor: Tensor, placement: Placement, size: int) -> Iterator[Tensor]:
    """Yield every rank's operand: its shard, the complete tensor, or a random summand."""
    if placement.is_shard:
        grouped = _grouped(tensor, placement)
        for part in grouped.chunk(size, placement.dim + 1):
            yield part.flatten(placement.dim, placement.dim + 1)
        return
    if placement.kind == "R":
        yield from [tensor] * size
        return
    generator = torch.Generator().manual_seed(tensor.numel())
    summands = [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for _ in range(size - 1)]
    yield from summands
    yield tensor - sum(summands)


def _grouped(tensor: Tensor, placement: Placement) -> Tensor:
    """Return the groups of the sharded dim, as a dim of their own in front of the rest."""
    shape = tensor.shape
    return tensor.reshape(*shape[: placement.dim], placement.groups, -1, *shape[placement.dim + 1 :])


def _dual(cotangent: Tensor, placement: Placement, size: int) -> Iterator[Tensor]:
    """Yield every rank's gradient of a result: its shard, or the complete one."""
    if placement.is_shard:
        yield from _split(cotangent, placement, size)
    else:
        yield from [cotangent] * size


def _joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the complete tensor of the ranks' shards."""
    if placement.kind == "P":
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    if placement.kind == "R":
        return parts[-1]
    grouped = [_grouped(part, placement) for part in parts]
    return torch.cat(grouped, placement.dim + 1).flatten(placement.dim, placement.dim + 1)


def _gathered(parts: Sequence[Any], placement: Placement) -> list[Tensor]:
    """Return the gradient to compare: a summand's is complete on every rank, a replica's is partial."""
    if placement.kind == "P":
        return list(parts)
    if placement.kind == "R":
        return [sum(parts[1:], start=parts[0])]
    if any(part.ndim == 0 for part in parts):
        return [torch.zeros(())]
    return [_joined(parts, placement)]


def _farthest(found: Tensor, whole: Tensor) -> float:
    """Return the largest difference relative to the largest unsharded value; 0 for a rounding error."""
    if found.dtype != whole.dtype or found.ndim != whole.ndim:
        found = found.to(whole.dtype).expand_as(whole)
    same = (found == whole) | (found.isnan() & whole.isnan())
    if bool(same.all()):
        return 0.0
    if not (whole.is_floating_point() or whole.is_complex()):
        return 1.0
    difference = torch.where(same, torch.zeros_like(whole), found - whole).abs()
    finite = whole[whole.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    far = float(difference.max()) / (scale or 1.0)
    return 0.0 if far <= _TOLERANCE.get(whole.dtype, 2e-2) else far


def _is_known(argument: Argument) -> bool:
    if isinstance(argument, Code):
        return _named(argument.text) is not None
    if isinstance(argument, (list, tuple)):
        return all(_is_known(item) for item in argument)
    return not isinstance(argument, dict)


def _value(argument: Argument, operands: Iterator[Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(operands)
    if isinstance(argument, Size):
        return argument.hint
    if isinstance(argument, Code):
        return _named(argument.text)
    if isinstance(argument, (list, tuple)):
        return [_value(item, operands) for item in argument]
    return argument


def _named(text: str) -> Any:
    """Evaluate ``torch.float32`` and the like, and numbers; None for any other code."""
    if text.isdigit():
        return int(text)
    prefix, _, name = text.rpartition(".")
    return getattr(torch, name, None) if prefix == "torch" else None
