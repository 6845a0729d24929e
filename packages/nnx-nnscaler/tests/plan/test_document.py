"""Plans as files: their contents, refusals, comparison and explanation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.nnscaler_plan_graphs import mlp, stack, strategies_of
from nnx_core.errors import PlanError
from nnx_core.machine.hardware import profile
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.evaluation import evaluate
from nnx_nnscaler.plan.flow import Flow
from nnx_nnscaler.plan.planning import assignment_of, plan_program
from nnx_nnscaler.plan_file import Plan, diff, explain, fingerprint

COSTS = CostModel(hardware=profile("h100-nvlink"))


def document(graph: Graph, policy: str = "tp", *, units: int = 1) -> Plan:
    program = plan_program(
        graph, size=2, policy=policy, costs=COSTS, units=units, strategies_of=strategies_of
    )
    return Plan.of(graph, program, costs=COSTS, units=units, strategies_of=strategies_of)


def test_a_plan_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    plan = document(stack(2), units=3)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.check(stack(2), world_size=6)
    assert loaded.explain() == plan.explain()


def test_another_world_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan 'a.json' is for 6 ranks \(3 units of 2\), and 4 are running"):
        document(mlp(), units=3).check(mlp(), world_size=4, path="a.json")


def test_another_model_is_refused_with_what_differs() -> None:
    with pytest.raises(PlanError, match="made for another graph: 4 operators are new and 3 are gone"):
        document(mlp()).check(stack(1), world_size=2)
    with pytest.raises(PlanError, match=r"made for another graph\. Plan again"):
        document(mlp()).check(mlp(hidden=128), world_size=2)


def test_the_traced_batch_is_no_part_of_the_fingerprint_but_modes_and_shapes_are() -> None:
    evaluating = mlp()
    evaluating.training = False
    prints = [fingerprint(graph) for graph in (mlp(8), mlp(16), mlp(8, width=32), evaluating)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: "no json", "is no JSON"),
        (lambda body: "[1]", "is no plan of nnx-nnscaler"),
        (lambda body: json.dumps({**body, "format": "other"}), "is no plan of nnx-nnscaler"),
        (lambda body: json.dumps({**body, "version": 99}), "has version 99, expected 1"),
        (lambda body: json.dumps({**body, "units": "x"}), "is damaged: ValueError"),
        (lambda body: json.dumps({k: v for k, v in body.items() if k != "program"}), "is damaged: KeyError"),
        (lambda body: json.dumps({**body, "rows": [{"name": "x"}]}), "is damaged: KeyError"),
    ],
)
def test_a_file_that_is_no_sound_plan_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document(mlp()).save(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json' cannot be read: No such file"):
        Plan.load(tmp_path / "none.json")


def test_plans_that_are_equal_do_not_differ_and_others_do_by_layer() -> None:
    before, after = document(stack(2), "tp"), document(stack(2), "data")
    assert diff(before, before) == []
    lines = diff(before, after)
    assert "policy: tp -> data" in lines
    assert "parameter blocks.1.up.weight: S(0) -> R synchronized" in lines
    assert "blocks.1.down: down1: row -> batch" in lines
    assert any(line.startswith("predicted step: ") for line in lines)
    assert "parameter up.weight: absent -> S(0)" in diff(document(stack(2)), document(mlp()))


def test_rows_add_up_to_the_operators_and_conversions_of_the_plan() -> None:
    graph = mlp()
    plan = document(graph)
    prices = COSTS.prices(graph, size=2)
    total = evaluate(Flow(graph), assignment_of(graph, plan.program), prices)
    expected = [*total.operators.values(), *(changed.price for changed in total.conversions)]
    assert sum(row.seconds for row in plan.rows) == pytest.approx(sum(price.seconds for price in expected))
    assert [row.name for row in plan.rows] == ["up", "act", "down", "loss"]


def test_alternatives_say_what_they_would_add() -> None:
    """Pinning an operator to the alternative, with the rest of the plan as it is, costs that much more."""
    graph = mlp()
    program = plan_program(graph, size=2, policy="tp", costs=COSTS, strategies_of=strategies_of)
    row = next(
        r for r in explain(graph, program, costs=COSTS, strategies_of=strategies_of) if r.name == "act"
    )
    name, extra = row.instead[0]
    assignment, flow, prices = assignment_of(graph, program), Flow(graph), COSTS.prices(graph, size=2)
    option = next(s for s in strategies_of(flow.ops["act"], graph, 2) if s.name == name)
    other = type(assignment)({**assignment.choices, "act": option}, assignment.stored)
    costs = [evaluate(flow, plan, prices).total.seconds for plan in (assignment, other)]
    assert extra == pytest.approx(costs[1] - costs[0])
    assert extra > 0


def test_an_explanation_says_what_was_split_where_and_at_what_price() -> None:
    text = document(mlp(), units=2).explain()
    assert text.startswith("policy tp: 2 units of 2 ranks, predicted by h100-nvlink (published): ")
    assert "2 of 2 parameters sharded, gradients of 0 summed over the unit" in text
    assert "model.py:1: up" in text
    assert "MB by all_reduce__keep" in text
    assert "instead: " in text
