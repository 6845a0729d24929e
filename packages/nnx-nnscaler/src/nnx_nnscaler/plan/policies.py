"""Policies, and the context that they narrow.

A `PolicyContext` holds the strategies of every operator. A policy narrows them in place (`pin`, `only`,
`store`), and may also return strategies of operators by name. The solver chooses among the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph, Op, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy
from nnx_nnscaler.options import PIPELINES
from nnx_nnscaler.plan.cost import Stored
from nnx_nnscaler.plan.flow import Flow
from nnx_nnscaler.plan.solver import Choices
from nnx_nnscaler.rules.rule import outputs_of

StrategiesOf = Callable[[Op, Graph, int], Iterable[Strategy]]


class PolicyContext:
    """A graph and its remaining options.

    Attributes:
        graph: The graph that is planned.
        size: The number of ranks of the unit.
        strategies: The remaining strategies of every operator, by name; never empty.
        stored: The remaining storage options of every parameter, by value name; never empty.
    """

    def __init__(self, graph: Graph, size: int, strategies_of: StrategiesOf) -> None:
        self.graph = graph
        self.size = size
        self.flow = Flow(graph)
        self.strategies: dict[str, tuple[Strategy, ...]] = {
            name: tuple(dict.fromkeys(strategies_of(op, graph, size))) for name, op in self.flow.ops.items()
        }
        self.stored: dict[str, tuple[Stored, ...]] = self._all_stored()

    def _all_stored(self) -> dict[str, tuple[Stored, ...]]:
        """Return the storage options: replicated, synchronized, or sharded as a strategy uses it."""
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
        # An even sharding saves memory also where no operator uses the parameter sharded.
        even = largest_part(meta, self.size)
        placements = dict.fromkeys([*parts, *([even] if even else [])])
        return (*whole, *map(Stored, placements)) if self.size > 1 else (Stored(R),)

    def op(self, name: str) -> Op:
        """Return an operator by name."""
        return self.flow.ops[name]

    def matching(self, pattern: str) -> list[Op]:
        """Return the operators of matching modules, and those that use matching parameters."""
        parameters = self.graph.parameters
        return [
            op
            for op in self.flow.ops.values()
            if fnmatchcase(op.module, pattern)
            or any(fnmatchcase(parameters[name], pattern) for name in op.operands() if name in parameters)
        ]

    def splits_batch(self, op: Op, strategy: Strategy) -> bool:
        """Return True if a tensor of the operator is split along the batch."""
        return any(self._along_batch(meta, placement) for meta, placement in self._placed(op, strategy))

    def splits_other(self, op: Op, strategy: Strategy) -> bool:
        """Return True if a tensor of the operator is split along another dim than the batch."""
        return any(
            placement.is_shard and not self._along_batch(meta, placement)
            for meta, placement in self._placed(op, strategy)
        )

    def splits_parameter(self, op: Op, strategy: Strategy) -> bool:
        """Return True if a parameter is used sharded."""
        operands = zip(op.operands(), strategy.inputs, strict=True)
        return any(placement.is_shard for name, placement in operands if name in self.graph.parameters)

    def _placed(self, op: Op, strategy: Strategy) -> Iterable[tuple[TensorMeta, Placement]]:
        metas = [self.graph.meta(name) for name in op.operands()]
        return zip((*metas, *outputs_of(op)), (*strategy.inputs, *strategy.outputs), strict=True)

    def _along_batch(self, meta: TensorMeta, placement: Placement) -> bool:
        """Return True if a placement shards the batch dim."""
        if not placement.is_shard:
            return False
        # Only batch dims have symbolic sizes. In a graph without symbols the batch is the first dim.
        if self.graph.symbols:
            return isinstance(meta.shape[placement.dim], Size)
        return placement.dim == 0 and not any(
            meta is self.graph.metas[name] for name in self.graph.parameters
        )

    def only(self, op: Op, wanted: Callable[[Op, Strategy], bool]) -> bool:
        """Keep only the wanted strategies; return False and keep all if there are none."""
        kept = tuple(strategy for strategy in self.strategies[op.name] if wanted(op, strategy))
        if kept:
            self.strategies[op.name] = kept
        return bool(kept)

    def pin(self, pattern: str, strategy: str) -> int:
        """Pin the operators of matching modules or parameters to a strategy.

        Args:
            pattern: A pattern of `fnmatch`, such as ``"blocks.*.fc"``.
            strategy: The name of a strategy, such as ``"column"``; operators without it stay free.

        Returns:
            The number of pinned operators.

        Raises:
            PlanError: No operator matches, or no matching operator has the strategy.
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
        """Store matching parameters in a placement.

        Returns:
            The number of matching parameters.

        Raises:
            PlanError: No parameter matches, or the placement does not fit one.
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
        """Choose strategies by operator name, as a callable policy may return them.

        Raises:
            PlanError: There is no such operator, or it has no such strategy.
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
        """Return the remaining options."""
        return Choices(self.strategies, self.stored)


Policy = Callable[[PolicyContext], "Mapping[str, Any] | None"]
"""Narrows a `PolicyContext`, and may return strategies (or their names) of operators, by operator name."""


def largest_part(meta: TensorMeta, size: int) -> Placement | None:
    """Return the placement that shards the first dim that splits evenly; None without one."""
    return next((S(dim) for dim in range(len(meta.shape)) if S(dim).fits(meta.hints, size)), None)


# The built-in policies, each a function that narrows the options.
#
# Pipeline policies are in `pipeline`, which splits a graph into stages and plans each stage with these.


def dp(context: PolicyContext) -> None:
    """Split nothing: data parallelism with units of one rank.

    Raises:
        PlanError: The unit has more than one rank.
    """
    if context.size > 1:
        raise PlanError(
            f"policy 'dp' splits nothing, but a unit has {context.size} ranks, which would compute the same.",
            remedy="Leave plan_ngpus at 1, or choose policy 'data', 'tp' or 'autodist'.",
        )


def data(context: PolicyContext) -> None:
    """Split the batch of a unit over its ranks wherever an operator can; parameters stay replicated."""
    for op in context.flow.ops.values():
        context.only(
            op, lambda op, one: not context.splits_other(op, one) and not _drops_batch(context, op, one)
        )
    for name, options in context.stored.items():
        whole = tuple(stored for stored in options if not stored.placement.is_shard)
        context.stored[name] = tuple(stored for stored in whole if stored.synchronized) or whole


def zero(context: PolicyContext) -> None:
    """Split as `data` does, and shard every parameter whose shape allows it; uses gather it."""
    data(context)
    for name in context.stored:
        part = largest_part(context.graph.metas[name], context.size)
        if part is not None and context.size > 1:
            context.stored[name] = (Stored(part),)


def tp(context: PolicyContext) -> None:
    """Split no batch; shard every weight that operators can use sharded."""
    for op in context.flow.ops.values():
        context.only(op, lambda op, one: not context.splits_batch(op, one))
        weights = [name for name in op.operands() if _is_weight(context, name)]
        if weights:
            context.only(op, context.splits_parameter)
    for name, options in context.stored.items():
        used = _uses_in_parts(context, name)
        parts = tuple(stored for stored in options if stored.placement in used)
        whole = tuple(stored for stored in options if not stored.placement.is_shard)
        context.stored[name] = (parts if _is_weight(context, name) else (*whole, *parts)) or whole


def autodist(context: PolicyContext) -> None:
    """Leave all options to the solver; `plan_program` prefers `data` unless it is clearly slower."""


def _drops_batch(context: PolicyContext, op: Op, strategy: Strategy) -> bool:
    """Return True if a strategy does not split the batch although another one could."""
    # A strategy on partial sums comes after a split batch, so it drops nothing.
    if context.splits_batch(op, strategy) or P in strategy.inputs:
        return False
    return any(
        context.splits_batch(op, one) and not context.splits_other(op, one)
        for one in context.strategies[op.name]
    )


def _is_weight(context: PolicyContext, name: str) -> bool:
    return name in context.graph.parameters and len(context.graph.metas[name].shape) > 1


def _uses_in_parts(context: PolicyContext, name: str) -> set[object]:
    return {
        strategy.inputs[position]
        for op in context.flow.ops.values()
        for position, operand in enumerate(op.operands())
        if operand == name
        for strategy in context.strategies[op.name]
        if strategy.inputs[position].is_shard
    }


POLICIES: dict[str, Policy] = {"dp": dp, "data": data, "zero": zero, "tp": tp, "autodist": autodist}
"""The built-in policies of one program by name; users pass a function for one of their own."""


def policy_of(policy: str | Policy) -> tuple[str, Policy]:
    """Return a policy and its name.

    Raises:
        OptionError: There is no policy of that name.
        UnsupportedError: The policy plans pipelines.
    """
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    if policy in PIPELINES:
        raise UnsupportedError(
            f"policy {policy!r} plans a pipeline, which is not one program.",
            remedy=f"Use one of {', '.join(POLICIES)}.",
        )
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}.", remedy=f"Use one of {', '.join(POLICIES)}.")
    return policy, POLICIES[policy]
