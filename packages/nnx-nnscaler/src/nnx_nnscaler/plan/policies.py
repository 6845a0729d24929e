"""The built-in policies, each a function that narrows what may be chosen, and the register for further ones.

Pipeline policies are not here: a stage would be one more choice, made before this one by cutting the graph
into subgraphs that each get a `ProgramPlan` of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.cost.model import Stored
from nnx_nnscaler.ir import Op
from nnx_nnscaler.placement import P
from nnx_nnscaler.plan.context import Policy, PolicyContext, largest_part
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["POLICIES", "policy_of", "register_policy"]

_OF_PIPELINES = ("pp", "hybrid")


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
    """As `data`, with every parameter stored in parts that are gathered for use, where its shape allows."""
    data(context)
    for name in context.stored:
        part = largest_part(context.graph.metas[name], context.size)
        if part is not None and context.size > 1:
            context.stored[name] = (Stored(part),)


def tp(context: PolicyContext) -> None:
    """The batch is never split; every weight that can be used in parts is, and is stored so."""
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
    """Whether an operator could split the batch, does not, and is not about partial sums either."""
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
"""Policies by name."""


def register_policy(name: str) -> Callable[[Policy], Policy]:
    """Make a policy known under a name, as a decorator.

    Args:
        name: The name by which it is asked for; a built-in name cannot be taken.

    Raises:
        OptionError: The name is taken.

    Example:
        >>> @register_policy("columns")
        ... def columns(context):
        ...     context.pin("*.fc", "column")
        >>> del POLICIES["columns"]
    """
    if name in POLICIES or name in _OF_PIPELINES:
        raise OptionError(f"there is a policy {name!r} already.", remedy="Choose another name.")

    def register(policy: Policy) -> Policy:
        POLICIES[name] = policy
        return policy

    return register


def policy_of(policy: str | Policy) -> tuple[str, Policy]:
    """A policy and its name.

    Raises:
        OptionError: There is none of that name.
        UnsupportedError: It plans pipelines.
    """
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    if policy in _OF_PIPELINES:
        raise UnsupportedError(
            f"policy {policy!r} plans a pipeline, which is for a later version.",
            remedy=f"Use one of {', '.join(POLICIES)}.",
        )
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}.", remedy=f"Use one of {', '.join(POLICIES)}.")
    return policy, POLICIES[policy]
