"""The solver against an exhaustive search, on small graphs."""

from __future__ import annotations

import itertools

import pytest

from jobs.nnscaler_plan_graphs import GraphMaker, mlp, stack, strategies_of
from nnx_core.machine.hardware import Hardware, Link, profile
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.plan.cost import CostModel, Prices
from nnx_nnscaler.plan.evaluation import evaluate
from nnx_nnscaler.plan.flow import Assignment
from nnx_nnscaler.plan.peak_memory import peak_memory
from nnx_nnscaler.plan.policies import PolicyContext
from nnx_nnscaler.plan.solver import Program, fold

FAST_LINK = Hardware(
    name="fast", origin="published", matmul={"float32": 1e9}, bandwidth=1e9, special=1e8, random=1e8,
    overhead=1e-6, update=1e-9, update_overhead=1e-6, fused_update=1e-9, host_update=1e-9,
    to_device=1e9, to_host=1e9,
    inside=Link(1e-6, 1e10), across=Link(1e-6, 1e10), ranks_per_node=8,
)  # fmt: skip


def shared_input() -> Graph:
    """Two projections of one value, which is added to them as well, as attention has them."""
    make = GraphMaker(4)
    x = make.input("x", 16, differentiable=True)
    q, k = make.linear("q", x, 16), make.linear("k", x, 16)
    return make.finish(make.mean("loss", make.add("qk", q, k)))


def tied() -> Graph:
    """One weight that two layers use."""
    make = GraphMaker(4)
    x = make.input("x", 16)
    first = make.linear("first", x, 16)
    weight = make.graph.ops[0].args[1]
    second = make.op("second", "aten.linear.default", (make.relu("act", first), weight), (make.batch, 16))
    return make.finish(make.mean("loss", second))


def two_results() -> Graph:
    make = GraphMaker(4)
    hidden = make.linear("hidden", make.input("x", 16), 32)
    return make.finish(make.relu("act", hidden), make.mean("loss", hidden))


GRAPHS = {
    "mlp": mlp(8, 16, 32),
    "wide": mlp(4, 64, 512),
    "long": mlp(512, 16, 32),
    "shared": shared_input(),
    "tied": tied(),
    "outputs": two_results(),
}


def every_plan(context: PolicyContext) -> list[Assignment]:
    names, parameters = list(context.strategies), list(context.stored)
    offered = [*context.strategies.values(), *context.stored.values()]
    plans = []
    for combination in itertools.product(*offered):
        chosen = dict(zip(names, combination, strict=False))
        plans.append(Assignment(chosen, dict(zip(parameters, combination[len(names) :], strict=True))))
    return plans


def cost(context: PolicyContext, plan: Assignment, prices: Prices) -> float:
    try:
        return evaluate(context.flow, plan, prices).total.seconds
    except ValueError:  # it needs a conversion that does not exist
        return float("inf")


def prices_of(graph: Graph, hardware: Hardware, *, size: int = 2, units: int = 1) -> Prices:
    return CostModel(hardware=hardware).prices(graph, size=size, units=units)


@pytest.mark.full
@pytest.mark.parametrize("hardware", [FAST_LINK, profile("cpu"), profile("h100-ib")], ids=lambda h: h.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_solver_finds_the_best_of_all_plans(name: str, hardware: Hardware) -> None:
    graph = GRAPHS[name]
    context = PolicyContext(graph, 2, strategies_of)
    prices = prices_of(graph, hardware)
    best = min(cost(context, plan, prices) for plan in every_plan(context))
    problem = fold(context.flow, context.choices(), tie=False)
    solution = Program(problem, prices).solve()
    assert solution is not None
    found = cost(context, problem.assignment(solution.chosen), prices)
    assert found == pytest.approx(solution.objective, rel=1e-6)
    assert found <= best * 1.0005


@pytest.mark.parametrize("units", [1, 4])
@pytest.mark.parametrize("policy_size", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_objective_is_what_the_plan_costs_also_where_layers_are_tied(
    layers: int, policy_size: int, units: int
) -> None:
    graph = stack(layers)
    context = PolicyContext(graph, policy_size, strategies_of)
    prices = prices_of(graph, FAST_LINK, size=policy_size, units=units)
    for tie in (True, False):
        problem = fold(context.flow, context.choices(), tie=tie)
        solution = Program(problem, prices).solve()
        assert solution is not None
        plan = problem.assignment(solution.chosen)
        assert cost(context, plan, prices) == pytest.approx(solution.objective, rel=1e-6)


def test_tying_repeated_layers_folds_them_into_one_and_loses_nothing_here() -> None:
    graph = stack(6)
    context = PolicyContext(graph, 2, strategies_of)
    prices = prices_of(graph, FAST_LINK)
    tied_problem, whole = (fold(context.flow, context.choices(), tie=tie) for tie in (True, False))
    assert len(tied_problem.nodes) == len(
        fold(PolicyContext(stack(2), 2, strategies_of).flow, context_of(2)).nodes
    )
    costs = [Program(problem, prices).solve().objective for problem in (tied_problem, whole)]  # type: ignore[union-attr]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def context_of(layers: int):  # type: ignore[no-untyped-def]
    return PolicyContext(stack(layers), 2, strategies_of).choices()


def test_members_of_a_plain_sequence_are_not_tied() -> None:
    """Two equal linear layers in a row want to be split in turns, by columns and by rows."""
    make = GraphMaker(4)
    x = make.input("x", 512)
    hidden = make.linear("net_0", x, 512, "net.0")
    out = make.linear("net_2", make.relu("net_1", hidden, "net.1"), 512, "net.2")
    graph = make.finish(make.mean("loss", out))
    problem = fold(
        PolicyContext(graph, 2, strategies_of).flow, PolicyContext(graph, 2, strategies_of).choices()
    )
    assert [len(node.members) for node in problem.nodes] == [1] * len(problem.nodes)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["mlp", "wide"])
def test_least_memory_is_near_the_least_of_all_plans(name: str) -> None:
    graph = GRAPHS[name]
    context = PolicyContext(graph, 2, strategies_of)
    prices = prices_of(graph, FAST_LINK)
    plans = [plan for plan in every_plan(context) if cost(context, plan, prices) < float("inf")]
    best = min(peak_memory(context.flow, plan, prices) for plan in plans)
    problem = fold(context.flow, context.choices())
    solution = Program(problem, prices, memory=True).solve(least_memory=True)
    assert solution is not None
    assert peak_memory(context.flow, problem.assignment(solution.chosen), prices) <= 1.1 * best


def test_the_same_problem_has_the_same_solution() -> None:
    def solved() -> tuple[int, ...]:
        context = PolicyContext(stack(3), 2, strategies_of)
        problem = fold(context.flow, context.choices())
        solution = Program(problem, prices_of(context.graph, profile("cpu"))).solve()
        assert solution is not None
        return solution.chosen

    assert solved() == solved()
