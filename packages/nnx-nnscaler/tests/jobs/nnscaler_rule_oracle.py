"""A trial of strategies: an unsharded operator against its shards on every rank, with gradients.

The tests of the table and of annotations use `check_strategy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # the field writes it so
from torch import Tensor

from nnx_core.communicator import Communicator, GroupCommunicator
from nnx_nnscaler.ir.graph import Argument, Code, Dim, Graph, Op, Ref, Size, TensorMeta, hint_of
from nnx_nnscaler.ir.placement import P, Placement, Strategy
from nnx_nnscaler.rules.registry import rule_for
from nnx_nnscaler.rules.rule import Rule
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.thread_ranks import run_as_ranks

DRAWS = ("normal", "unit")
"""The kinds of random values: standard normal, and between 0 and 1 for operators with that domain."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.complex128: 1e-10}


def check_strategy(
    op: Op,
    graph: Graph,
    strategy: Strategy,
    size: int,
    *,
    rule: Rule | None = None,
    draws: Sequence[str] = DRAWS,
    seed: int = 0,
) -> str:
    """Run an operator unsharded and by a strategy, in float64, and compare results and gradients.

    Args:
        op: The operator.
        graph: The graph that it stands in.
        strategy: The strategy under test.
        size: Number of ranks, which are threads of this process.
        rule: The rule that writes the call; the operator's own by default.
        draws: The kinds of values to try; one that the whole operator refuses is left out.
        seed: Chooses the values.

    Returns:
        The differences; empty if all results are equal.
    """
    if op.target == "getitem":
        return ""  # the result is the operand, and its operand is not one tensor
    tried = 0
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for draw in draws:
            trial = _Trial(op, graph, strategy, size, rule or rule_for(op), seed)
            if not trial.can_run(draw):
                continue
            tried += 1
            difference = trial.difference()
            if difference:
                return f"{op.target} as {strategy.name} on {size} ranks, {draw} values: {difference}"
    return "" if tried else f"{op.target} cannot be run on made-up values"


class _NumberWriter:
    """Writes calls for the traced sizes, with operators by their full names."""

    def __init__(self, size: int) -> None:
        self.size = size

    def value(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return argument.name
        if isinstance(argument, Code):
            return argument.text
        if isinstance(argument, Size):
            return str(argument.hint)
        if isinstance(argument, (list, tuple)):
            return "[" + ", ".join(self.value(item) for item in argument) + "]"
        if isinstance(argument, float) and not math.isfinite(argument):
            return f"float('{argument}')"
        return repr(argument)

    def dim(self, dim: Dim, *, sharded: bool = False) -> str:
        return str(hint_of(dim) // self.size if sharded else hint_of(dim))

    def shape(self, meta: TensorMeta, placement: Placement) -> str:
        return str(list(placement.local_shape(meta.hints, self.size)))

    def call(self, op: Op) -> str:
        if op.target == "getitem":
            return f"{self.value(op.args[0])}[{op.args[1]}]"
        arguments = [self.value(argument) for argument in op.args]
        arguments += [f"{name}={self.value(argument)}" for name, argument in op.kwargs.items()]
        return f"torch.ops.{op.target}({', '.join(arguments)})"


@dataclass(slots=True)
class _Trial:
    """One comparison: the values, the unsharded operator's results, and the ranks' results."""

    op: Op
    graph: Graph
    strategy: Strategy
    size: int
    rule: Rule
    seed: int
    values: dict[str, Tensor] = field(default_factory=dict)
    cotangents: list[Tensor | None] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)

    def can_run(self, draw: str) -> bool:
        """Run the whole operator, differentiated in all operands or those that the graph differentiates."""
        self.make_values(draw)
        names = [
            name for name, value in self.values.items() if value.is_floating_point() or value.is_complex()
        ]
        differentiable = [name for name in names if self.graph.meta(name).differentiable]
        for followed in (names, differentiable, []):
            self.followed = set(followed)
            try:
                self.run_whole()
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                continue
            return True
        return False

    def make_values(self, draw: str) -> None:
        """Values for all operands."""
        generator = torch.Generator().manual_seed(self.seed)
        bound = self.rule.index_bound(self.op, self.graph)
        for name in dict.fromkeys(self.op.operands()):
            self.values[name] = _made_up(self.graph.meta(name), bound, draw, generator)

    def run_whole(self) -> None:
        """Compute the results of one process, and the gradients for random gradients of these results."""
        torch.manual_seed(self.seed)
        leaves = {name: self._leaf(name, value) for name, value in self.values.items()}
        code = _NumberWriter(1).call(self.op)
        self.results = _run(code, leaves, Runtime(GroupCommunicator(None)))
        generator = torch.Generator().manual_seed(self.seed + 1)
        self.cotangents = [
            torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
            if result.requires_grad
            else None
            for result in self.results
        ]
        _backward(self.results, self.cotangents)
        self.gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def difference(self) -> str:
        """Return the first difference of the ranks' results or gradients from one process; empty if none."""
        torch.manual_seed(self.seed)
        try:
            ranks = run_as_ranks(self.size, self._run_rank)
        except Exception as error:  # whatever a wrong strategy does to an operator
            return f"{type(error).__name__}: {error}"
        for index, placement in enumerate(self.strategy.outputs):
            found = _assembled([results[index] for results, _ in ranks], placement, self.size)
            where = f"result {index} ({placement})"
            if difference := _compared(found, self.results[index].detach(), where):
                return difference
        for name, placement in zip(self.op.operands(), self.strategy.inputs, strict=True):
            parts = [gradients.get(name) for _, gradients in ranks]
            if difference := self._compared_gradient(name, placement, parts):
                return difference
        return ""

    def _run_rank(self, communicator: Communicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        runtime = Runtime(communicator)
        leaves = {}
        for name, placement in zip(self.op.operands(), self.strategy.inputs, strict=True):
            leaves[name] = self._leaf(name, self._local(self.values[name], placement, runtime))
        code = self.rule.write(self.op, self.strategy, _NumberWriter(self.size))
        with torch.enable_grad():
            results = _run(code, leaves, runtime)
            cotangents = [
                None
                if whole is None
                else runtime.part(whole, placement.dim, placement.groups)
                if placement.is_shard
                else whole
                for whole, placement in zip(self.cotangents, self.strategy.outputs, strict=True)
            ]
            _backward(results, cotangents)
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return [result.detach() for result in results], gradients

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_(name in self.followed)

    def _local(self, whole: Tensor, placement: Placement, runtime: Runtime) -> Tensor:
        """Return a rank's shard of a value."""
        if placement.is_shard:
            return runtime.part(whole, placement.dim, placement.groups).clone()
        if placement != P:
            return whole.clone()
        generator = torch.Generator().manual_seed(self.seed + 2)
        summands = [
            torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(self.size - 1)
        ]
        rest = whole.clone()
        for summand in summands:
            rest -= summand
        return [*summands, rest][runtime.rank]

    def _compared_gradient(self, name: str, placement: Placement, parts: list[Tensor | None]) -> str:
        """A gradient is cut as its value is; of a whole value in split work, each rank has a summand."""
        whole = self.gradients.get(name)
        present = [part for part in parts if part is not None]
        if whole is None:
            return "" if all(not part.any() for part in present) else f"{name} gets a gradient"
        if len(present) != len(parts):
            return f"{name} gets no gradient on {len(parts) - len(present)} of {len(parts)} ranks"
        summed = not placement.is_shard and placement != P and not self.strategy.is_replicated
        found = _assembled(present, P if summed else _dual(placement), self.size)
        return _compared(found, whole, f"gradient of {name} ({placement})")


def _dual(placement: Placement) -> Placement:
    return placement if placement.is_shard else Placement("R")


def _run(code: str, values: dict[str, Tensor], runtime: Runtime) -> list[Tensor]:
    """The tensors that a line of code makes."""
    names: dict[str, Any] = {"torch": torch, "F": F, "rt": runtime, **values}
    result = eval(code, names)  # written by the rule that is checked
    results = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in results if isinstance(item, Tensor)]


def _backward(results: list[Tensor], cotangents: Sequence[Tensor | None]) -> None:
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [cotangent for _, cotangent in pairs])


def _made_up(meta: TensorMeta, bound: int | None, draw: str, generator: torch.Generator) -> Tensor:
    """A tensor of made-up values; floating point ones in double precision."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    if dtype == torch.bool:
        return torch.rand(meta.hints, generator=generator) < 0.6
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, bound or 4, meta.hints, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(meta.hints, generator=generator, dtype=torch.complex128)
    if draw == "unit":
        return 0.05 + 0.9 * torch.rand(meta.hints, generator=generator, dtype=torch.float64)
    return torch.randn(meta.hints, generator=generator, dtype=torch.float64)


def _assembled(parts: list[Tensor], placement: Placement, size: int) -> Tensor | str:
    """The whole that the ranks hold, or why they hold none."""
    if placement.is_shard:
        dim, groups = placement.dim, placement.groups
        if any(part.ndim <= dim or part.shape[dim] % groups for part in parts):
            return f"shapes {[tuple(part.shape) for part in parts]}"
        grouped = [part.unflatten(dim, (groups, -1)) for part in parts]  # type: ignore[no-untyped-call]
        return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)
    if placement == P:
        return torch.stack(parts).sum(0)
    same = all(torch.equal(part.nan_to_num(), parts[0].nan_to_num()) for part in parts)
    return parts[0] if same else f"the {size} ranks do not have the same"


def _compared(found: Tensor | str, whole: Tensor, what: str) -> str:
    if isinstance(found, str):
        return f"{what}: {found}"
    if found.shape != whole.shape or found.dtype != whole.dtype:
        return f"{what}: {found.dtype} {tuple(found.shape)} instead of {whole.dtype} {tuple(whole.shape)}"
    if not (whole.is_floating_point() or whole.is_complex()):
        return "" if torch.equal(found, whole) else f"{what}: other values"
    tolerance = _TOLERANCE.get(whole.dtype, 3e-2)
    if torch.allclose(found, whole, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{what}: off by {(found - whole).abs().nan_to_num().max().item():.3g}"
