"""Evaluate a complete plan: the seconds of its operators, conversions and parameters.

The solver minimises the same sum. This module chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nnx_nnscaler.ir.placement import Conversion, P, Placement, R, Use, conversion, uses_of
from nnx_nnscaler.plan.cost import Price, Prices, Stored
from nnx_nnscaler.plan.flow import Assignment, Flow

__all__ = [
    "Evaluation",
    "evaluate",
    "price_of_change",
    "price_of_value",
]


class Changed(NamedTuple):
    """One conversion of a plan.

    Attributes:
        value: The value that is converted.
        source: The placement of its producer.
        use: The placement that its consumers need.
        change: The collectives; None for a synchronized parameter, whose uses need none.
        consumers: The operators that share the conversion; ``""`` is the forward's result.
        price: The cost of the conversion.
    """

    value: str
    source: Placement
    use: Use
    change: Conversion | None
    consumers: tuple[str, ...]
    price: Price


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The cost of a plan on one rank.

    Attributes:
        operators: The price of every operator.
        conversions: Every conversion, in order of values.
        parameters: The price of every parameter's reduction and update, by value name.
        total: The sum of all prices.
    """

    operators: Mapping[str, Price]
    conversions: tuple[Changed, ...]
    parameters: Mapping[str, Price]
    total: Price


def price_of_change(
    prices: Prices, name: str, stored: Stored | None, source: Placement, use: Use
) -> Price | None:
    """Return the cost of a use of a value; None if it is impossible.

    Args:
        prices: The prices of the graph.
        name: The value.
        stored: The storage of a parameter; None for other values.
        source: The placement of its producer.
        use: The placement that the consumer needs.
    """
    meta = prices.graph.meta(name)
    # Only operators make partial sums; no conversion does.
    if use.placement == P != source:
        return None
    # The reducer sums the gradient of a synchronized parameter, so a partial one costs no collective here.
    if stored is not None and stored.synchronized and prices.backward and meta.differentiable:
        return Price() if use.partial_gradient else prices.synchronized(meta, use.placement)
    try:
        return prices.conversion(meta, source, use, again=name in prices.recomputed)
    except ValueError:
        return None


def conversions_of(flow: Flow, assignment: Assignment, prices: Prices) -> Iterator[Changed]:
    """Yield every conversion of a plan, once for all consumers that share it.

    Raises:
        ValueError: No conversion gives a consumer its placement.
    """
    for name, consumers in flow.values().items():
        yield from _of_value(flow, assignment, prices, name, [(c.op, c.position) for c in consumers])


def _of_value(
    flow: Flow, assignment: Assignment, prices: Prices, name: str, consumers: list[tuple[str, int]]
) -> Iterator[Changed]:
    source, stored = assignment.placement(flow, name), assignment.stored.get(name)
    wanted: dict[Use, list[str]] = {}
    for op, position in consumers:
        use = uses_of(assignment.choices[op])[position] if op else Use(R)
        wanted.setdefault(use, []).append(op)
    for use, users in wanted.items():
        price = price_of_change(prices, name, stored, source, use)
        if price is None:
            raise ValueError(f"no conversion of {name} from {source} to {use.placement}")
        change = None if stored is not None and stored.synchronized else conversion(source, use)
        if change is not None or price.seconds > 0:
            yield Changed(name, source, use, change, tuple(dict.fromkeys(users)), price)


def price_of_value(flow: Flow, assignment: Assignment, prices: Prices, name: str) -> Price:
    """Return the cost of all conversions of one value.

    Raises:
        ValueError: No conversion gives a consumer its placement.
    """
    consumers = [(consumer.op, consumer.position) for consumer in flow.values().get(name, ())]
    total = Price()
    for changed in _of_value(flow, assignment, prices, name, consumers):
        total = total.plus(changed.price)
    return total


def evaluate(flow: Flow, assignment: Assignment, prices: Prices) -> Evaluation:
    """Return the cost of a plan."""
    operators = {name: prices.operator(op, assignment.choices[name]) for name, op in flow.ops.items()}
    conversions = tuple(conversions_of(flow, assignment, prices))
    parameters = {
        name: prices.parameter(flow.graph.metas[name], stored) for name, stored in assignment.stored.items()
    }
    total = prices.standing
    for price in (*operators.values(), *(changed.price for changed in conversions), *parameters.values()):
        total = total.plus(price)
    # The first synchronized parameter starts a reduction over the unit; the others join it.
    if any(stored.synchronized for stored in assignment.stored.values()):
        total = total.plus(prices.synchronization)
    return Evaluation(operators, conversions, parameters, total)
