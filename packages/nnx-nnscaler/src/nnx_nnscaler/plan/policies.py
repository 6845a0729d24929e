"""Policies, and the context that they work on.

Every operator's ways of being split, which a policy narrows down in place (`pin`, `only`, `store`); it may
also return the strategy of some operators itself, by name. The solver decides the others.
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
        self.strategies: dict[str, tuple[Strategy, ...]] = {
            name: tuple(dict.fromkeys(strategies_of(op, graph, size))) for name, op in self.flow.ops.items()
        }
        self.stored: dict[str, tuple[Stored, ...]] = self._all_stored()

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
        """Return True if some tensor of an operator is split along the batch."""
        return any(self._along_batch(meta, placement) for meta, placement in self._placed(op, strategy))

    def splits_other(self, op: Op, strategy: Strategy) -> bool:
        """Return True if some tensor of an operator is split along a dim that is not the batch."""
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
        """The batch is what has a symbol for its size; in a graph without symbols, the first dim."""
        if not placement.is_shard:
            return False
        if self.graph.symbols:
            return isinstance(meta.shape[placement.dim], Size)
        return placement.dim == 0 and not any(
            meta is self.graph.metas[name] for name in self.graph.parameters
        )

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
        """The open choices."""
        return Choices(self.strategies, self.stored)


Policy = Callable[[PolicyContext], "Mapping[str, Any] | None"]
"""Narrows a `PolicyContext`, and may return strategies (or their names) of operators, by operator name."""


def largest_part(meta: TensorMeta, size: int) -> Placement | None:
    """Return the first dim that splits evenly: the layout of a sharded parameter that is used unsharded."""
    return next((S(dim) for dim in range(len(meta.shape)) if S(dim).fits(meta.hints, size)), None)


# The built-in policies, each a function that narrows what may be chosen.
#
# Pipeline policies are not here: `pipeline` cuts a graph into stages, which each get a plan from here.


def dp(context: PolicyContext) -> None:
    """Nothing is split: units of one rank, replicated.

    Raises:
        PlanError: The unit has more ranks.
    """
    if context.size > 1:
        raise PlanError(
            f"policy 'dp' splits nothing, but a unit has {context.size} ranks, which would all do the same.",
            remedy="Leave plan_ngpus at 1, or choose policy 'data', 'tp' or 'autodist'.",
        )


def data(context: PolicyContext) -> None:
    """The batch of a unit is split over its ranks wherever an operator can; parameters stay whole."""
    for op in context.flow.ops.values():
        context.only(
            op, lambda op, one: not context.splits_other(op, one) and not _drops_batch(context, op, one)
        )
    for name, options in context.stored.items():
        whole = tuple(stored for stored in options if not stored.placement.is_shard)
        context.stored[name] = tuple(stored for stored in whole if stored.synchronized) or whole


def zero(context: PolicyContext) -> None:
    """As `data`, with every parameter sharded and gathered for use, if its shape allows."""
    data(context)
    for name in context.stored:
        part = largest_part(context.graph.metas[name], context.size)
        if part is not None and context.size > 1:
            context.stored[name] = (Stored(part),)


def tp(context: PolicyContext) -> None:
    """Split no batch; split and shard every weight that can be used sharded."""
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
    """Everything is left to the solver, which prefers `data` where the difference is less than it knows."""


def _drops_batch(context: PolicyContext, op: Op, strategy: Strategy) -> bool:
    """Return True if an operator could split the batch, does not, and is not about partial sums either."""
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
    """A policy and its name.

    Raises:
        OptionError: There is none of that name.
        UnsupportedError: It plans pipelines.
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
