"""What a policy works on: every operator's ways of being split, which it narrows down; the rest is solved.

A policy is a function that takes a `PolicyContext`. It may narrow choices in place (`pin`, `only`, `store`),
or return the strategy of some operators itself, by name; what it leaves open goes to the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from nnx_core.errors import PlanError
from nnx_nnscaler.cost import Stored
from nnx_nnscaler.ir import Graph, Op, Size, TensorMeta
from nnx_nnscaler.plan.evaluation import Flow
from nnx_nnscaler.plan.program_plan import Placement, R, S, Strategy
from nnx_nnscaler.plan.solver import Choices
from nnx_nnscaler.rules.rule import outputs_of

__all__ = ["Policy", "PolicyContext", "StrategiesOf"]

StrategiesOf = Callable[[Op, Graph, int], Iterable[Strategy]]


class PolicyContext:
    """A graph and what may still be chosen for it.

    Attributes:
        graph: The graph that is planned.
        size: Ranks of the unit.
        strategies: The strategies that every operator may choose from, by name; never empty.
        stored: The ways in which every parameter may be stored, by value name; never empty.
    """

    def __init__(self, graph: Graph, size: int, strategies_of: StrategiesOf) -> None:
        self.graph = graph
        self.size = size
        self.flow = Flow(graph)
        self.strategies: dict[str, tuple[Strategy, ...]] = self._all_strategies(strategies_of)
        self.stored: dict[str, tuple[Stored, ...]] = self._all_stored()

    def _all_strategies(self, strategies_of: StrategiesOf) -> dict[str, tuple[Strategy, ...]]:
        ops = self.flow.ops.items()
        return {name: tuple(dict.fromkeys(strategies_of(op, self.graph, self.size))) for name, op in ops}

    def _all_stored(self) -> dict[str, tuple[Stored, ...]]:
        """Whole, whole with gradients that are summed later, or in one of the parts that someone uses."""
        wanted: dict[str, dict[Placement, None]] = {name: {} for name in self.graph.parameters}
        for name, op in self.flow.ops.items():
            for position, operand in enumerate(op.operands()):
                if operand in wanted:
                    used = [strategy.inputs[position] for strategy in self.strategies[name]]
                    wanted[operand].update(
                        dict.fromkeys(placement for placement in used if placement.is_shard)
                    )
        return {name: self._stored(self.graph.metas[name], parts) for name, parts in wanted.items()}

    def _stored(self, meta: TensorMeta, parts: Iterable[Placement]) -> tuple[Stored, ...]:
        whole = (Stored(R), Stored(R, synchronized=True)) if meta.differentiable else (Stored(R),)
        even = largest_part(meta, self.size)
        placements = dict.fromkeys([*parts, *([even] if even else [])])
        return (*whole, *map(Stored, placements)) if self.size > 1 else (Stored(R),)

    # --- looking --------------------------------------------------------------------------------

    def op(self, name: str) -> Op:
        """An operator by name."""
        return self.flow.ops[name]

    def matching(self, pattern: str) -> list[Op]:
        """Operators that belong to a module whose name matches, or that use a parameter whose name does."""
        parameters = self.graph.parameters
        return [
            op
            for op in self.flow.ops.values()
            if fnmatchcase(op.module, pattern)
            or any(fnmatchcase(parameters[name], pattern) for name in op.operands() if name in parameters)
        ]

    def splits_batch(self, op: Op, strategy: Strategy) -> bool:
        """Whether some tensor of an operator is split along the batch."""
        return any(self._along_batch(meta, placement) for meta, placement in self._placed(op, strategy))

    def splits_other(self, op: Op, strategy: Strategy) -> bool:
        """Whether some tensor of an operator is split along a dim that is not the batch."""
        return any(
            placement.is_shard and not self._along_batch(meta, placement)
            for meta, placement in self._placed(op, strategy)
        )

    def splits_parameter(self, op: Op, strategy: Strategy) -> bool:
        """Whether a parameter is used in parts."""
        operands = zip(op.operands(), strategy.inputs, strict=True)
        return any(placement.is_shard for name, placement in operands if name in self.graph.parameters)

    def _placed(self, op: Op, strategy: Strategy) -> Iterable[tuple[TensorMeta, Placement]]:
        metas = [self.graph.meta(name) for name in op.operands()]
        return zip((*metas, *outputs_of(op)), (*strategy.inputs, *strategy.outputs), strict=True)

    def _along_batch(self, meta: TensorMeta, placement: Placement) -> bool:
        """The batch is what has a symbol for its size; in a graph without symbols, the first dim."""
        if not placement.is_shard:
            return False
        if self.graph.symbols:
            return isinstance(meta.shape[placement.dim], Size)
        return placement.dim == 0 and not any(
            meta is self.graph.metas[name] for name in self.graph.parameters
        )

    # --- narrowing down -------------------------------------------------------------------------

    def only(self, op: Op, wanted: Callable[[Op, Strategy], bool]) -> bool:
        """Keep the strategies that are wanted, if there are any; whether there were."""
        kept = tuple(strategy for strategy in self.strategies[op.name] if wanted(op, strategy))
        if kept:
            self.strategies[op.name] = kept
        return bool(kept)

    def pin(self, pattern: str, strategy: str) -> int:
        """Let the operators of matching modules (or parameters) take the strategy of that name.

        Args:
            pattern: Such as ``"blocks.*.fc"``; `fnmatch` rules.
            strategy: Such as ``"column"``. Operators of these modules that know no such strategy stay free.

        Returns:
            How many operators were pinned.

        Raises:
            PlanError: Nothing matches, or nothing that matches knows the strategy.
        """
        ops = self.matching(pattern)
        pinned = sum(self.only(op, lambda _, one: one.name == strategy) for op in ops)
        if pinned:
            return pinned
        if not ops:
            modules = sorted({op.module for op in self.flow.ops.values() if op.module})
            raise PlanError(
                f"no operator belongs to {pattern!r}.",
                remedy=f"Use a pattern of module or parameter names, such as {', '.join(modules[:3])}.",
            )
        known = dict.fromkeys(one.name for op in ops for one in self.strategies[op.name])
        raise PlanError(
            f"no operator of {pattern!r} can be split as {strategy!r} over {self.size} ranks.",
            remedy=f"Use one of: {', '.join(known)}.",
        )

    def store(self, pattern: str, placement: Placement) -> int:
        """Let matching parameters be stored in a placement.

        Returns:
            How many parameters that concerns.

        Raises:
            PlanError: No parameter matches, or one cannot be stored so.
        """
        names = [name for name, fqn in self.graph.parameters.items() if fnmatchcase(fqn, pattern)]
        if not names:
            some = ", ".join(list(self.graph.parameters.values())[:3])
            raise PlanError(
                f"no parameter is called {pattern!r}.", remedy=f"Use a pattern of names such as {some}."
            )
        for name in names:
            self._store(name, placement)
        return len(names)

    def _store(self, name: str, placement: Placement) -> None:
        shape = self.graph.metas[name].hints
        if placement.kind == "P" or not placement.fits(shape, self.size):
            raise PlanError(
                f"parameter {self.graph.parameters[name]!r} of shape {list(shape)} cannot be stored "
                f"{placement} over {self.size} ranks.",
                remedy="Choose R, or a dim that is a multiple of the ranks.",
            )
        known = tuple(stored for stored in self.stored[name] if stored.placement == placement)
        self.stored[name] = known or (Stored(placement),)

    def choose(self, chosen: Mapping[str, Any]) -> None:
        """Take strategies by operator name, as a callable policy may return them.

        Raises:
            PlanError: There is no such operator, or it cannot be split so.
        """
        for name, strategy in chosen.items():
            if name not in self.strategies:
                raise PlanError(
                    f"the policy chooses for {name!r}, which is no operator of the graph.",
                    remedy="Use the names of `context.graph.ops`; a getitem has no choice.",
                )
            known = [one for one in self.strategies[name] if strategy in (one, one.name)]
            if not known:
                raise PlanError(
                    f"the policy chooses {strategy!r} for {name!r}, which cannot be split so.",
                    remedy=f"Use one of: {', '.join(one.name for one in self.strategies[name])}.",
                )
            self.strategies[name] = tuple(known)

    def choices(self) -> Choices:
        """What is left to choose."""
        return Choices(self.strategies, self.stored)


Policy = Callable[[PolicyContext], "Mapping[str, Any] | None"]
"""Narrows a `PolicyContext`, and may return strategies (or their names) of operators, by operator name."""


def largest_part(meta: TensorMeta, size: int) -> Placement | None:
    """The first dim that can be cut evenly: how a parameter is stored in parts that nobody uses as such."""
    return next((S(dim) for dim in range(len(meta.shape)) if S(dim).fits(meta.hints, size)), None)
